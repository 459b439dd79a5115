"""The protocol of all comparisons: contestants in turn, plain reading between them.

One round: reading, contestant, reading, contestant, ..., reading; the order turns from round to
round. A ratio is taken within a round. Memory of a shared machine has fast and slow times: a round
is fast when every reading in it is, slow when none is, and ratios count in fast rounds
(``FAST_GB_PER_S``, for two threads; with one thread no round is called fast or slow).
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moechat import _native

FAST_GB_PER_S = 65.0
READ_BYTES = 2 << 30
PAUSE_SECONDS = 0.1  # longer than any contestant's threads spin after their work


class Reading:
    """Plain reading of mapped bytes [n], at most 2 GiB of them, by some threads."""

    def __init__(self, data: NDArray[np.uint8], threads: int) -> None:
        self.threads = threads
        self._data = data[: min(READ_BYTES, data.size)]
        self._share_bytes = self._data.size // threads // 512 * 512
        self._pool = ThreadPoolExecutor(threads)
        self.gb_per_s()  # pages of the mapping are entered once

    def gb_per_s(self) -> float:
        """The better of two passes."""
        return max(self._pass(), self._pass())

    def _pass(self) -> float:
        share = self._share_bytes
        began = time.perf_counter()
        parts = [
            self._pool.submit(_native.read_checksum, self._data, part * share, (part + 1) * share)
            for part in range(self.threads)
        ]
        for part in parts:
            part.result()
        return share * self.threads / (time.perf_counter() - began) / 1e9

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


@dataclass(frozen=True)
class Round:
    """Values and the two readings beside each, by contestant; other processes' busy cores."""

    values: dict[str, float]
    reads: dict[str, tuple[float, float]]
    others: float

    def fraction(self, name: str) -> float:
        """A value over the mean of its neighbouring readings."""
        return self.values[name] / statistics.mean(self.reads[name])

    @property
    def regime(self) -> str:
        """fast, slow, or mixed."""
        fast = [read >= FAST_GB_PER_S for pair in self.reads.values() for read in pair]
        return "fast" if all(fast) else "mixed" if any(fast) else "slow"


def run_rounds(
    contestants: Mapping[str, Callable[[], float]],
    reading: Reading,
    count: int,
    pids: Sequence[int] = (),
) -> list[Round]:
    """``count`` rounds after one that warms up; ``pids`` are the contestants' own processes."""
    names, rounds = list(contestants), []
    for number in range(count + 1):
        shift = number % len(names)
        values, reads = {}, {}
        began, ours, total = time.perf_counter(), _cpu_seconds(pids), _busy_seconds()
        before = reading.gb_per_s()
        for name in names[shift:] + names[:shift]:
            values[name] = contestants[name]()
            time.sleep(PAUSE_SECONDS)
            after = reading.gb_per_s()
            reads[name], before = (before, after), after
        busy = _busy_seconds() - total - (_cpu_seconds(pids) - ours)
        others = max(busy / (time.perf_counter() - began), 0.0)
        if number:
            rounds.append(Round({name: values[name] for name in names}, reads, others))
    return rounds


def _busy_seconds() -> float:
    """Processor seconds of all processes, and those taken by the host."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    user, nice, system, _, _, irq, softirq, steal = fields[:8]
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _cpu_seconds(pids: Sequence[int]) -> float:
    """Processor seconds of this process and some others."""
    total = time.process_time()
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median and range."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} [{low:.{digits}f}-{high:.{digits}f}]"


def print_rounds(title: str, unit: str, rounds: Sequence[Round], digits: int = 1) -> None:
    """Every round as a row of Markdown; ratios are to the last contestant, the peer."""
    names = list(rounds[0].values)
    print(f"\n{title}; {unit} (GB/s of reading before, after)\n")
    heads = ["round", *names, *(f"{name} / {names[-1]}" for name in names[:-1]), "others", "regime"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for number, round_ in enumerate(rounds, 1):
        cells = [str(number)]
        for name in names:
            before, after = round_.reads[name]
            cells.append(f"{round_.values[name]:.{digits}f} ({before:.1f}, {after:.1f})")
        cells += [f"{round_.values[name] / round_.values[names[-1]]:.2f}" for name in names[:-1]]
        print(f"| {' | '.join([*cells, f'{round_.others:.2f}', round_.regime])} |")


def print_summary(rounds: Sequence[Round], unit: str, digits: int = 1) -> None:
    """Medians and ranges of all rounds, and of the fast ones when they are fewer."""
    names = list(rounds[0].values)
    groups = {"all": list(rounds), "fast": [r for r in rounds if r.regime == "fast"]}
    if len(groups["fast"]) in (0, len(rounds)):
        del groups["fast"]
    heads = ["rounds", "n", "reading GB/s", *(f"{name} {unit}" for name in names)]
    heads += [f"{name} / {names[-1]}" for name in names[:-1]]
    print(f"\nmedian [lowest-highest]\n\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for label, chosen in groups.items():
        reads = [read for r in chosen for pair in r.reads.values() for read in pair]
        cells = [label, str(len(chosen)), spread(reads, 1)]
        cells += [spread([r.values[name] for r in chosen], digits) for name in names]
        for name in names[:-1]:
            cells.append(spread([r.values[name] / r.values[names[-1]] for r in chosen]))
        print(f"| {' | '.join(cells)} |")


def print_header(**versions: Any) -> None:
    """Machine, date and versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(": ")[1] for line in lines if line.startswith("model name")), "?")
    print(f"machine: {model}, {os.cpu_count()} processors, Linux {platform.release()}")
    print(f"date: {time.strftime('%Y-%m-%d %H:%M')}")
    for name, version in versions.items():
        print(f"{name}: {version}")
    print(f"moechat: instruction set {_native.active_instruction_set()}", flush=True)
