"""The protocol of all comparisons: contestants in turn, plain reading between them.

One round: reading, contestant, reading, contestant, ..., reading; who begins changes from round to
round. A ratio is taken within a round. Memory of a shared machine has fast and slow times: a round
is fast when all its readings with two threads or more reach ``FAST_GB_PER_S``, slow when none does;
ratios to peers count in fast rounds.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moechat import _native
from moechat.bench.bursts import FAST_BYTES_PER_SECOND
from moechat.bench.reading import Reader

FAST_GB_PER_S = FAST_BYTES_PER_SECOND / 1e9
QUIET_CORES = 0.15  # of other processes and the host, in a round that they do not disturb
READ_SECONDS = 0.2
PAUSE_SECONDS = 0.1  # longer than any contestant's threads spin after their work


class Reading:
    """Plain reading of mapped bytes [n] by some threads, as moechat's bench measures it."""

    def __init__(self, data: NDArray[np.uint8], threads: int) -> None:
        self._threads = threads
        pools = {count: _native.ThreadPool(count) for count in {threads, max(threads, 2)}}
        self._reader = Reader([data], pools, READ_SECONDS)
        self._reader.read_all(max(threads, 2))  # the mapping's pages are entered once

    def read(self) -> tuple[float, float]:
        """GB/s by the threads asked for, and by two at least: that tells the regime."""
        rate = self._reader.read(self._threads).best / 1e9
        return rate, rate if self._threads > 1 else self._reader.read(2).best / 1e9


@dataclass(frozen=True)
class Round:
    """Values and the readings before and after each, by contestant; other jobs' busy cores."""

    values: dict[str, float]
    reads: dict[str, tuple[float, float]]
    others: float
    regime: str

    def fraction(self, name: str, gb_per_unit: float) -> float:
        """Of its neighbouring readings' mean."""
        return self.values[name] * gb_per_unit / statistics.mean(self.reads[name])


def _regime(rates: Sequence[float]) -> str:
    fast = [rate >= FAST_GB_PER_S for rate in rates]
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
        readings = [reading.read()]
        for name in names[shift:] + names[:shift]:
            values[name] = contestants[name]()
            time.sleep(PAUSE_SECONDS)
            readings.append(reading.read())
            reads[name] = (readings[-2][0], readings[-1][0])
        busy = _busy_seconds() - total - (_cpu_seconds(pids) - ours)
        others = max(busy / (time.perf_counter() - began), 0.0)
        if number:
            regime = _regime([rate for _, rate in readings])
            rounds.append(Round({name: values[name] for name in names}, reads, others, regime))
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


def print_rounds(title: str, unit: str, rounds: Sequence[Round]) -> None:
    """Every round as a row of Markdown; ratios are to the last contestant, the peer."""
    names = list(rounds[0].values)
    print(f"\n{title}; {unit} (GB/s of reading before, after)\n")
    heads = ["round", *names, *(f"{name} / {names[-1]}" for name in names[:-1]), "others", "regime"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for number, round_ in enumerate(rounds, 1):
        cells = [str(number)]
        for name in names:
            before, after = round_.reads[name]
            cells.append(f"{round_.values[name]:.1f} ({before:.1f}, {after:.1f})")
        cells += [f"{round_.values[name] / round_.values[names[-1]]:.2f}" for name in names[:-1]]
        print(f"| {' | '.join([*cells, f'{round_.others:.2f}', round_.regime])} |")


def print_summary(
    rounds: Sequence[Round], unit: str, gb_per_unit: Mapping[str, float] | None = None
) -> None:
    """Medians and ranges of all rounds, and of undisturbed and fast ones when those are fewer.

    ``gb_per_unit`` are the gigabytes that one unit of a contestant must read.
    """
    names = list(rounds[0].values)
    weights = gb_per_unit or {}
    groups = {
        "all": list(rounds),
        "undisturbed": [r for r in rounds if r.others < QUIET_CORES],
        "fast": [r for r in rounds if r.regime == "fast"],
    }
    for label in ("undisturbed", "fast"):
        if len(groups[label]) in (0, len(rounds)):
            del groups[label]
    heads = ["rounds", "n", "reading GB/s", *(f"{name} {unit}" for name in names)]
    heads += [f"{name} GB/s" for name in weights if weights[name] != 1]
    heads += [f"{name} / reading" for name in weights]
    heads += [f"{name} / {names[-1]}" for name in names[:-1]]
    print(f"\nmedian [lowest-highest]\n\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for label, chosen in groups.items():
        reads = [read for r in chosen for pair in r.reads.values() for read in pair]
        cells = [label, str(len(chosen)), spread(reads, 1)]
        cells += [spread([r.values[name] for r in chosen], 1) for name in names]
        for name, weight in weights.items():
            if weight != 1:
                cells.append(spread([r.values[name] * weight for r in chosen], 1))
        for name, weight in weights.items():
            cells.append(spread([r.fraction(name, weight) for r in chosen]))
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
