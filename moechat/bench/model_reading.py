"""Plain reading of a model's files, to compare with: the one place that measures it here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from moechat import _native
from moechat.weights.mapped import map_file

_BURST_SECONDS = 0.15
_PIECE_BYTES = 32 << 20  # what one thread reads in one call


class PlainReading:
    """Reads the weight files in turn, from where the burst before ended. Closed by ``close()``."""

    def __init__(self, files: Sequence[Path], threads: int) -> None:
        arrays = [map_file(path) for path in files]
        self._pieces = [
            (array, begin, min(begin + _PIECE_BYTES, len(array)))
            for array in arrays
            for begin in range(0, len(array), _PIECE_BYTES)
        ]
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)
        self._next = 0

    def burst(self) -> float:
        """Bytes a second of all threads together."""
        began = time.perf_counter()
        stop = began + _BURST_SECONDS
        done = sum(self._pool.map(lambda _: self._read(stop), range(self._threads)))
        return done / (time.perf_counter() - began)

    def _read(self, stop: float) -> int:
        done = 0
        while done == 0 or time.perf_counter() < stop:
            # Two threads may take the same piece once in a while, which does not matter.
            number, self._next = self._next, self._next + 1
            array, begin, end = self._pieces[number % len(self._pieces)]
            _native.read_checksum(array, begin, end)
            done += end - begin
        return done

    def close(self) -> None:
        """End the threads and let go of the mappings."""
        self._pool.shutdown()
        self._pieces = []
