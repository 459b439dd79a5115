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


@dataclass(frozen=True, slots=True)
class Work:
    """What was done in some time. ``bytes`` had to be read from memory for it.

    ``cpu_seconds`` are those of all threads of the process.
    """

    calls: int
    seconds: float
    cpu_seconds: float
    bytes: int


class Contestant(Protocol):
    """What is measured. The readings beside it use as many ``threads``."""

    @property
    def threads(self) -> int:
        """Threads that compute."""

    def burst(self) -> Work:
        """Call after call for a fraction of a second."""


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
    """One contestant's work in one round, and the readings before and after."""

    round: int
    work: Work
    before: Reading
    after: Reading

    @property
    def seconds_per_call(self) -> float:
        """Mean time of a call."""
        return self.work.seconds / self.work.calls

    @property
    def bytes_per_second(self) -> float:
        """Rate of all its calls together."""
        return self.work.bytes / self.work.seconds

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
        return self.work.bytes / self.work.cpu_seconds / read

    @property
    def fixed_seconds_per_call(self) -> float:
        """A call's time less what reading its bytes would take."""
        read = self.work.bytes / self.work.calls / self.read_bytes_per_second
        return self.seconds_per_call - read

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

    def keys(self, name: str, median: str = "") -> dict[str, float]:
        """For a report: ``name`` with ``median`` after it, ``name``_min and ``name``_max."""
        return {
            name + median: rounded(self.median),
            f"{name}_min": rounded(self.min),
            f"{name}_max": rounded(self.max),
        }


def rounded(value: float) -> float:
    """Four significant digits: more would be noise."""
    return float(f"{value:.4g}")


def read_keys(bursts: Sequence[Burst]) -> dict[str, float]:
    """Weights read and plain reading in GB/s, and their ratio: medians and ranges."""
    return {
        **Spread.of([burst.bytes_per_second / 1e9 for burst in bursts]).keys("weight_gb_per_s"),
        **Spread.of([burst.read_bytes_per_second / 1e9 for burst in bursts]).keys("read_gb_per_s"),
        **Spread.of([burst.fraction_of_read for burst in bursts]).keys("fraction_of_read"),
    }


def regime(bursts: Sequence[Burst]) -> str:
    """ "fast" when all bursts were, "slow" when none was, else "mixed"."""
    fast = sum(burst.fast for burst in bursts)
    return "mixed" if 0 < fast < len(bursts) else "fast" if fast else "slow"


def run_rounds(
    contestants: Sequence[Contestant], read: Callable[[int], Reading], rounds: int
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
            work = contestant.burst()
            after = read(threads)
            yield index, Burst(round_, work, before, after)
            before = after


def repeat(
    call: Callable[[], int],
    seconds: float,
    clock: Clock = time.perf_counter,
    cpu_clock: Clock = time.process_time,
) -> Work:
    """A call that returns its bytes, at least once, until the time is up."""
    calls = num_bytes = 0
    began, cpu_began = clock(), cpu_clock()
    while True:
        num_bytes += call()
        calls += 1
        passed = clock() - began
        if passed >= seconds:
            return Work(calls, passed, cpu_clock() - cpu_began, num_bytes)
