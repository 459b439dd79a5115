"""Rows of ``bench kernels``: from bursts in bytes and seconds to figures with units in their keys."""

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
    max_relative_error: float,
) -> dict[str, Any]:
    """One contestant's figures: medians over its bursts with their range, and the raw bursts.

    ``first``: the bursts of the row that time a token is compared with, round by round; its batch
    is told by its row.
    """
    rate = Spread.of([burst.bytes_per_second / 1e9 for burst in bursts])
    read = Spread.of([burst.read_bytes_per_second / 1e9 for burst in bursts])
    milliseconds = Spread.of([burst.seconds_per_call * 1e3 for burst in bursts])
    fraction = Spread.of([burst.fraction_of_read for burst in bursts])
    to_first = Spread.of(
        [own.seconds_per_call / other.seconds_per_call for own, other in zip(bursts, first)]
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
        "regime": regime(bursts),
        "time_over_first_row": _round(to_first.median),
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
        "regime": "fast" if burst.fast else "slow",
    }


def _round(value: float) -> float:
    """Four significant digits: more would be noise."""
    return float(f"{value:.4g}")
