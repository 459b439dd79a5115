"""Rows of ``bench kernels``: bursts become figures that have their unit in their key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moechat import _native
from moechat.bench.bursts import Burst, Spread, regime


def moe_ffn_row(
    format_: str,
    threads: int,
    batch: int,
    bursts: Sequence[Burst],
    first: Sequence[Burst],
    first_batch: int,
    max_relative_error: float,
) -> dict[str, Any]:
    """One contestant's figures: medians over its bursts with their range, and the raw bursts.

    ``first`` and ``first_batch``: the row that the time of a token is compared with, by round.
    """
    rate = Spread.of([burst.bytes_per_second / 1e9 for burst in bursts])
    read = Spread.of([burst.read_bytes_per_second / 1e9 for burst in bursts])
    milliseconds = Spread.of([burst.seconds_per_call * 1e3 for burst in bursts])
    fraction = Spread.of([burst.fraction_of_read for burst in bursts])
    to_first = Spread.of(
        [
            own.seconds_per_call / batch / (other.seconds_per_call / first_batch)
            for own, other in zip(bursts, first, strict=True)
        ]
    )
    return {
        "op": "moe_ffn",
        "format": format_,
        "isa": _native.active_instruction_set(),
        "threads": threads,
        "batch": batch,
        "ms_median": _round(milliseconds.median),
        "ms_min": _round(milliseconds.min),
        "ms_max": _round(milliseconds.max),
        "weight_bytes_per_call": round(
            sum(burst.bytes for burst in bursts) / sum(burst.calls for burst in bursts)
        ),
        "weight_gb_per_s": _round(rate.median),
        "weight_gb_per_s_min": _round(rate.min),
        "weight_gb_per_s_max": _round(rate.max),
        "read_gb_per_s": _round(read.median),
        "read_gb_per_s_min": _round(read.min),
        "read_gb_per_s_max": _round(read.max),
        "fraction_of_read": _round(fraction.median),
        "fraction_of_read_min": _round(fraction.min),
        "fraction_of_read_max": _round(fraction.max),
        "fraction_of_read_by_cpu_time": _round(
            Spread.of([burst.fraction_of_read_by_cpu_time for burst in bursts]).median
        ),
        "regime": regime(bursts),
        "cpu_share": _round(Spread.of([cpu_share(burst, threads) for burst in bursts]).median),
        "time_per_token_over_first_row": _round(to_first.median),
        "max_relative_error": float(f"{max_relative_error:.3g}"),
        "bursts": [_raw(burst) for burst in bursts],
    }


def _raw(burst: Burst) -> dict[str, Any]:
    return {
        "round": burst.round,
        "calls": burst.calls,
        "ms_per_call": _round(burst.seconds_per_call * 1e3),
        "weight_gb_per_s": _round(burst.bytes_per_second / 1e9),
        "read_before_gb_per_s": _round(burst.before.best / 1e9),
        "read_after_gb_per_s": _round(burst.after.best / 1e9),
        "read_before_without_prefetch_gb_per_s": _round(burst.before.plain / 1e9),
        "read_after_without_prefetch_gb_per_s": _round(burst.after.plain / 1e9),
        "fraction_of_read": _round(burst.fraction_of_read),
        "fraction_of_read_by_cpu_time": _round(burst.fraction_of_read_by_cpu_time),
        "regime": "fast" if burst.fast else "slow",
        "cpu_ms_per_call": _round(burst.cpu_seconds / burst.calls * 1e3),
    }


def cpu_share(burst: Burst, threads: int) -> float:
    """Processor time that a burst got, over what its threads could have had.

    Below 1 other programs used the processors too; waiting for memory counts as use.
    """
    return burst.cpu_seconds / (burst.seconds * min(threads, _native.available_cpus()))


def _round(value: float) -> float:
    """Four significant digits: more would be noise."""
    return float(f"{value:.4g}")
