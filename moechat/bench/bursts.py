"""Short bursts between readings: how a rate is measured on a machine whose speed wanders.

Every contestant's burst lies between two bursts of plain reading with as many threads. What counts
is the ratio of the two within a round, and the median over the rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

# Memory on shared hosts flips between about 45 and 78 GB/s of reading with two threads. Ratios to
# other programs count where both neighbouring readings reach this.
FAST_BYTES_PER_SECOND = 65e9

Clock = Callable[[], float]


class Contestant(Protocol):
    """What is measured: one call after another."""

    @property
    def threads(self) -> int:
        """Threads that compute; the readings beside it use as many."""

    def call(self) -> int:
        """Do it once; the bytes that had to be read from memory, each counted once."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Bytes a second of one burst of plain reading, without and with software prefetch.

    The last two: bytes a second of processor time, of all threads together.
    """

    plain: float
    prefetched: float
    plain_cpu: float
    prefetched_cpu: float

    @property
    def best(self) -> float:
        """The faster of the two."""
        return max(self.plain, self.prefetched)

    @property
    def best_cpu(self) -> float:
        """The faster of the two by processor time."""
        return max(self.plain_cpu, self.prefetched_cpu)


@dataclass(frozen=True, slots=True)
class Burst:
    """Calls of one contestant in one round, and the readings before and after."""

    round: int
    calls: int
    seconds: float
    cpu_seconds: float  # of all threads of the process
    bytes: int
    before: Reading
    after: Reading

    @property
    def seconds_per_call(self) -> float:
        """Mean time of a call."""
        return self.seconds / self.calls

    @property
    def bytes_per_second(self) -> float:
        """Rate of all its calls together."""
        return self.bytes / self.seconds

    @property
    def read_bytes_per_second(self) -> float:
        """Mean of the neighbouring readings."""
        return (self.before.best + self.after.best) / 2

    @property
    def fraction_of_read(self) -> float:
        """The rate over that of plain reading."""
        return self.bytes_per_second / self.read_bytes_per_second

    @property
    def fraction_of_read_by_cpu_time(self) -> float:
        """The same by processor time: what others take of the processors does not count."""
        read = (self.before.best_cpu + self.after.best_cpu) / 2
        return self.bytes / self.cpu_seconds / read

    @property
    def fast(self) -> bool:
        """Whether memory was in its fast regime before and after."""
        return min(self.before.best, self.after.best) >= FAST_BYTES_PER_SECOND


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and greatest of some values."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


def regime(bursts: Sequence[Burst]) -> str:
    """ "fast" when all bursts were, "slow" when none was, else "mixed"."""
    fast = sum(burst.fast for burst in bursts)
    return "mixed" if 0 < fast < len(bursts) else "fast" if fast else "slow"


def run_rounds(
    contestants: Sequence[Contestant],
    read: Callable[[int], Reading],
    rounds: int,
    burst_seconds: float,
    clock: Clock = time.perf_counter,
    cpu_clock: Clock = time.process_time,
) -> Iterator[tuple[int, Burst]]:
    """Let the contestants take turns; yields (index of the contestant, burst) as they come.

    ``read(threads)`` is one burst of reading. Between two contestants with as many threads one
    reading serves both.
    """
    before: Reading | None = None
    threads = 0
    for round_ in range(rounds):
        for index, contestant in enumerate(contestants):
            if before is None or contestant.threads != threads:
                threads = contestant.threads
                before = read(threads)
            cpu_began = cpu_clock()
            calls, num_bytes, seconds = burst(contestant.call, burst_seconds, clock)
            cpu_seconds = cpu_clock() - cpu_began
            after = read(threads)
            yield index, Burst(round_, calls, seconds, cpu_seconds, num_bytes, before, after)
            before = after


def burst(call: Callable[[], int], seconds: float, clock: Clock) -> tuple[int, int, float]:
    """Repeat a call, at least once, until the time is up: (calls, bytes, seconds)."""
    calls = num_bytes = 0
    began = clock()
    while True:
        num_bytes += call()
        calls += 1
        passed = clock() - began
        if passed >= seconds:
            return calls, num_bytes, passed
