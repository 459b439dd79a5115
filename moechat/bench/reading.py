"""Plain reading of a mapping: the speed that everything else is measured against."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from moechat import _native
from moechat.bench.bursts import Clock, Reading, burst

# About what a call of DeepSeek-V3 experts reads between two hand-overs to the threads.
_SPAN_BYTES = 256 << 20


class Reader:
    """Reads ``bytes`` [n] round and round, with the pool of as many threads as are asked for.

    Each reading takes about ``seconds``, half of it with software prefetch. Loads are the widest of
    this CPU; the instruction set that is forced on other kernels changes nothing here.
    """

    def __init__(
        self,
        bytes: NDArray[np.uint8],
        pools: Mapping[int, _native.ThreadPool],
        seconds: float,
        clock: Clock = time.perf_counter,
        cpu_clock: Clock = time.process_time,
    ) -> None:
        self._bytes, self._pools = bytes, pools
        self._seconds, self._clock, self._cpu_clock = seconds, clock, cpu_clock
        self._place = 0

    def read(self, threads: int) -> Reading:
        """One burst without and one with prefetch; each goes on where the last one stopped."""
        rates, cpu_rates = [], []
        for prefetch in (False, True):
            cpu_began = self._cpu_clock()
            _, num_bytes, seconds = burst(
                lambda prefetch=prefetch: self._read_span(threads, prefetch),  # type: ignore[misc]
                self._seconds / 2,
                self._clock,
            )
            rates.append(num_bytes / seconds)
            cpu_rates.append(num_bytes / (self._cpu_clock() - cpu_began))
        return Reading(*rates, *cpu_rates)

    def read_all(self, threads: int) -> None:
        """Every byte once: its pages are then in memory and in the page tables."""
        _native.read_bandwidth(self._pools[threads], self._bytes, 0, self._bytes.nbytes)

    def _read_span(self, threads: int, prefetch: bool) -> int:
        begin = self._place
        end = min(begin + _SPAN_BYTES, self._bytes.nbytes)
        self._place = end % self._bytes.nbytes
        _native.read_bandwidth(self._pools[threads], self._bytes, begin, end, prefetch)
        return end - begin
