"""Rows of ``bench kernels``: bursts become figures with their unit in the key, and a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from moechat import _native
from moechat.bench.amounts import figure
from moechat.bench.bursts import Burst, Spread, read_keys, regime, rounded
from moechat.bench.doubts import busy_before, unsteady_reading
from moechat.bench.machine import thread_notes
from moechat.bench.table import Bar, Table, Text


def moe_ffn_row(
    format_: str,
    threads: int,
    batch: int,
    bursts: Sequence[Burst],
    first: Sequence[Burst],
    first_batch: int,
) -> dict[str, Any]:
    """One contestant's figures: medians over its bursts with their range, and the raw bursts.

    ``first`` and ``first_batch``: the row that the time of a token is compared with, by round.
    """
    to_first = [
        own.seconds_per_call / batch / (other.seconds_per_call / first_batch)
        for own, other in zip(bursts, first, strict=True)
    ]
    by_cpu_time = [burst.fraction_of_read_by_cpu_time for burst in bursts]
    return {
        "op": "moe_ffn",
        "format": format_,
        "isa": _native.active_instruction_set(),
        "threads": threads,
        "batch": batch,
        **Spread.of([burst.seconds_per_call * 1e3 for burst in bursts]).keys("ms", "_median"),
        "weight_bytes_per_call": round(
            sum(burst.work.bytes for burst in bursts) / sum(burst.work.calls for burst in bursts)
        ),
        **read_keys(bursts),
        "fraction_of_read_by_cpu_time": rounded(Spread.of(by_cpu_time).median),
        "regime": regime(bursts),
        "cpu_share": rounded(Spread.of([cpu_share(burst, threads) for burst in bursts]).median),
        "time_per_token_over_first_row": rounded(Spread.of(to_first).median),
        "bursts": [_raw(burst) for burst in bursts],
    }


def _raw(burst: Burst) -> dict[str, Any]:
    return {
        "round": burst.round,
        "calls": burst.work.calls,
        "ms_per_call": rounded(burst.seconds_per_call * 1e3),
        "weight_gb_per_s": rounded(burst.bytes_per_second / 1e9),
        "read_before_gb_per_s": rounded(burst.before.best / 1e9),
        "read_after_gb_per_s": rounded(burst.after.best / 1e9),
        "read_before_without_prefetch_gb_per_s": rounded(burst.before.plain / 1e9),
        "read_after_without_prefetch_gb_per_s": rounded(burst.after.plain / 1e9),
        "fraction_of_read": rounded(burst.fraction_of_read),
        "fraction_of_read_by_cpu_time": rounded(burst.fraction_of_read_by_cpu_time),
        "regime": "fast" if burst.fast else "slow",
        "cpu_ms_per_call": rounded(burst.work.cpu_seconds / burst.work.calls * 1e3),
    }


def cpu_share(burst: Burst, threads: int) -> float:
    """Processor time that a burst got, over what its threads could have had.

    Below 1 other programs used the processors too; waiting for memory counts as use.
    """
    work = burst.work
    return work.cpu_seconds / (work.seconds * min(threads, _native.available_cpus()))


def kernel_text(report: dict[str, Any]) -> Text:
    """The report for people: one line a row, and what spoils figures."""
    shape, machine = report["shape"], report["machine"]
    kernels = sorted({row["isa"] for row in report["rows"]})
    error = max(facts["max_relative_error"] for facts in report["weights"])
    text: Text = [
        f"moe_ffn of {shape['name']}: top {shape['experts_per_token']} experts of "
        f"{shape['inner']} x {shape['hidden']}, {'+'.join(kernels)}, on {machine['cpu']}",
        _table(report),
        f"largest relative difference from the reference kernels: {figure(error, 2)}",
        "where a call's time goes, in one more burst, under profiling; imbalance: the busiest "
        "thread over the mean, 1 is even:",
        *map(_phases, report["rows"]),
        *(f"note: {note}" for note in thread_notes(row["threads"] for row in report["rows"])),
        *unsteady_reading(report["rows"]),
        *busy_before(machine),
    ]
    cached = [
        facts["format"]
        for facts in report["weights"]
        if (facts["file_over_last_level_cache"] or math.inf) < 1
    ]
    if cached:
        text.append(f"the caches could hold all of it, no measure of memory: {', '.join(cached)}")
    paged = [facts["format"] for facts in report["weights"] if facts["major_page_faults"]]
    if paged:
        text.append(
            f"memory was short and weights came from disk: no measure of memory: {', '.join(paged)}"
        )
    return text


def _table(report: dict[str, Any]) -> Table:
    head = ("FORMAT", "THREADS", "BATCH", "MS", "GB/S", "READ", "OF READING", "REGIME")
    cells = [
        (
            row["format"],
            str(row["threads"]),
            str(row["batch"]),
            figure(row["ms_median"], 4),
            f"{row['weight_gb_per_s']:.1f}",
            f"{row['read_gb_per_s']:.1f}",
            Bar(*(row["fraction_of_read" + end] for end in ("", "_min", "_max"))),
            row["regime"],
        )
        for row in report["rows"]
    ]
    settings, shape = report["settings"], report["shape"]
    legend = (
        f"MS: a call, which takes BATCH rows through {shape['experts_per_token']} experts each; "
        "GB/s: its weight bytes; READ: plain reading with as many threads, between the bursts, "
        "GB/s; OF READING: of a burst to the reading around it, least and greatest in "
        f"parentheses. All are medians of {settings['bursts']} bursts, each column's own. REGIME: "
        f"fast where reading reached {settings['fast_regime_min_read_gb_per_s']:g} GB/s around "
        "every burst, slow where around none"
    )
    return Table("", head, cells, frozenset({"FORMAT", "REGIME"}), legend)


def _phases(row: dict[str, Any]) -> str:
    times = ", ".join(
        f"{phase['phase'].removeprefix('experts.')} {100 * phase['share_of_time']:.0f} %"
        + ("" if phase["imbalance"] is None else f" (imbalance {phase['imbalance']:.2f})")
        for phase in row["phases"]
    )
    threads = f"{row['threads']} thread{'s' * (row['threads'] != 1)}"
    return f"{row['format']}, {threads}, batch {row['batch']}: {times}"
