"""Plain reading of mapped files: the speed that everything else is measured against."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moechat import _native
from moechat.bench.bursts import Clock, Reading, Work, repeat

# About what a call of DeepSeek-V3 experts reads between two hand-overs to the threads.
_SPAN_BYTES = 256 << 20
_MADV_POPULATE_READ = 22  # Linux 5.14


class Reader:
    """Reads mappings, uint8 [n] each, round and round, with the pool of as many threads as asked.

    Each reading takes about ``seconds``, half of it with software prefetch. Loads are the widest of
    this CPU; the instruction set that is forced on other kernels changes nothing here.
    """

    def __init__(
        self,
        mappings: Sequence[NDArray[np.uint8]],
        pools: Mapping[int, _native.ThreadPool],
        seconds: float,
        clock: Clock = time.perf_counter,
        cpu_clock: Clock = time.process_time,
    ) -> None:
        self._pools, self._seconds = pools, seconds
        self._clock, self._cpu_clock = clock, cpu_clock
        self._spans = [
            (mapping, begin, min(begin + _SPAN_BYTES, mapping.nbytes))
            for mapping in mappings
            for begin in range(0, mapping.nbytes, _SPAN_BYTES)
        ]
        self._next = 0

    def read(self, threads: int) -> Reading:
        """One burst without and one with prefetch; each goes on where the last one stopped."""
        plain, prefetched = self._burst(threads, False), self._burst(threads, True)
        return Reading(
            plain.bytes / plain.seconds,
            prefetched.bytes / prefetched.seconds,
            plain.bytes / plain.cpu_seconds,
            prefetched.bytes / prefetched.cpu_seconds,
        )

    def read_all(self, threads: int) -> None:
        """Every byte once: its pages are then in memory and in the page tables."""
        for _ in self._spans:
            self._read_span(threads, False)

    def _burst(self, threads: int, prefetch: bool) -> Work:
        def call() -> int:
            return self._read_span(threads, prefetch)

        return repeat(call, self._seconds / 2, self._clock, self._cpu_clock)

    def _read_span(self, threads: int, prefetch: bool) -> int:
        mapping, begin, end = self._spans[self._next]
        self._next = (self._next + 1) % len(self._spans)
        _native.read_bandwidth(self._pools[threads], mapping, begin, end, prefetch)
        return end - begin


def populate(files: Iterable[Path], room_bytes: int) -> bool:
    """Fill the page tables of every mapping that this process has of ``files``.

    A page of a mapped file costs a page fault when a process first reads it there, also when the
    file is in memory. In a long talk that has happened for all experts; in short bursts it would be
    most of what is measured. False when nothing was done: they are larger than ``room_bytes`` in
    all, or this system cannot.
    """
    paths = {str(path.resolve()) for path in files}
    if sum(Path(path).stat().st_size for path in paths) > room_bytes:
        return False
    try:
        spans = list(_mapped_spans(paths))
    except (OSError, ValueError):
        return False
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    failed = [madvise(begin, end - begin, _MADV_POPULATE_READ) for begin, end in spans]
    return bool(spans) and not any(failed)


def _mapped_spans(paths: set[str]) -> Iterator[tuple[int, int]]:
    """Addresses of the mappings of files, in pieces between which Ctrl-C is noticed.

    From the highest down, which is the order in which they were mapped: the kernel goes on reading
    a file in large pages through the mapping that began to.
    """
    for line in reversed(Path("/proc/self/maps").read_text("utf-8", "replace").splitlines()):
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5] in paths:
            first, last = (int(address, 16) for address in fields[0].split("-"))
            for begin in range(first, last, _SPAN_BYTES):
                yield begin, min(begin + _SPAN_BYTES, last)
