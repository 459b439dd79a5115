"""Figures of ``bench model`` as JSON rows, units in the keys, and as a text for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moechat.bench.extrapolate import Spread
from moechat.bench.model_bytes import TokenBytes

Table = list[tuple[str, ...]]  # the first row is the head

_UNSTEADY = 1.5  # memory this many times faster at one time than at another
_RATES = ("TOK/S", "MIN", "MAX")
_DECODE_HEAD = ("CONTEXT", *_RATES, "MS/TOKEN", "GB/S", "READ GB/S", "OF READ", "FIXED MS")


def rounded(value: float) -> float:
    """Four significant digits: more would be noise."""
    return float(f"{value:.4g}")


def seconds_keys(name: str, spread: Spread) -> dict[str, float]:
    """``name``_median, _min and _max."""
    return {
        f"{name}_median": rounded(spread.median),
        f"{name}_min": rounded(spread.least),
        f"{name}_max": rounded(spread.greatest),
    }


def rate_keys(tokens: int, spread: Spread) -> dict[str, float]:
    """Tokens a second of ``tokens`` in so many seconds."""
    return {
        "tokens_per_second_median": rounded(tokens / spread.median),
        "tokens_per_second_min": rounded(tokens / spread.greatest),
        "tokens_per_second_max": rounded(tokens / spread.least),
    }


def prefill_row(tokens: int, seconds: Sequence[float]) -> dict[str, Any]:
    """One length of prompt."""
    spread = Spread.of(seconds)
    return {
        "prompt_tokens": tokens,
        "repetitions": len(seconds),
        **seconds_keys("seconds", spread),
        **rate_keys(tokens, spread),
    }


def decode_row(
    context: int,
    tokens: int,
    seconds: Sequence[float],
    reads: Sequence[float],
    num_bytes: TokenBytes,
) -> dict[str, Any]:
    """One context. ``seconds`` a token and ``reads`` (bytes a second beside it), by repetition."""
    spread, read = Spread.of(seconds), Spread.of(reads)
    fraction = Spread.of([num_bytes.total / s / read for s, read in zip(seconds, reads)])
    fixed = Spread.of([s - num_bytes.total / read for s, read in zip(seconds, reads)])
    return {
        "context_tokens": context,
        "repetitions": len(seconds),
        "tokens_a_repetition": tokens,
        **seconds_keys("seconds_per_token", spread),
        **rate_keys(1, spread),
        "weight_gb_per_s": rounded(num_bytes.total / spread.median / 1e9),
        "read_gb_per_s": rounded(read.median / 1e9),
        "read_gb_per_s_min": rounded(read.least / 1e9),
        "read_gb_per_s_max": rounded(read.greatest / 1e9),
        "fraction_of_read": rounded(fraction.median),
        "fraction_of_read_min": rounded(fraction.least),
        "fraction_of_read_max": rounded(fraction.greatest),
        **seconds_keys("fixed_seconds_per_token", fixed),
    }


def bytes_facts(num_bytes: TokenBytes) -> dict[str, int]:
    """Weight bytes of one decoded token."""
    return {
        "routed_bytes_per_token": num_bytes.routed,
        "head_bytes_per_token": num_bytes.head,
        "weight_bytes_per_token": num_bytes.total,
    }


def sampling_row(vocab: int, seconds: Sequence[float]) -> dict[str, Any]:
    """Drawing one token."""
    spread = Spread.of(seconds)
    return {"vocab_tokens": vocab, **seconds_keys("seconds_per_token", spread)}


def tables(report: dict[str, Any]) -> list[tuple[str, Table]]:
    """The report's tables for people, each with its title."""
    found = []
    if report["prefill"]:
        table: Table = [("PROMPT", "TOK/S", "MIN", "MAX", "SECONDS")]
        for row in report["prefill"]:
            table.append(
                (
                    f"{row['prompt_tokens']:,}",
                    *_rates(row),
                    f"{row['seconds_median']:.4g}",
                )
            )
        found.append(("prefill", table))
    table = [_DECODE_HEAD]
    for row in report["decode"]:
        table.append(
            (
                f"{row['context_tokens']:,}",
                *_rates(row),
                _ms(row["seconds_per_token_median"]),
                f"{row['weight_gb_per_s']:.3g}",
                f"{row['read_gb_per_s']:.3g}",
                f"{row['fraction_of_read']:.2f}",
                _ms(row["fixed_seconds_per_token_median"]),
            )
        )
    found.append(("decode", table))
    return found


def lines(report: dict[str, Any]) -> list[str]:
    """What the tables do not say, one fact a line."""
    sizes = report["bytes"]
    text = [
        f"{report['model']}: {report['threads']} threads, {report['instruction_set']}, "
        f"{report['machine']['cpu'] or 'unknown processor'}",
        f"bytes a token: {_gb(sizes['weight_bytes_per_token'])} of weights, "
        f"{_gb(sizes['routed_bytes_per_token'])} of them routed experts, "
        f"{_gb(sizes['head_bytes_per_token'])} the head",
    ]
    if report["decode"]:
        row = report["decode"][0]
        text.append(
            f"fixed cost a token: {_ms(row['fixed_seconds_per_token_median'])} ms "
            f"({_ms(row['fixed_seconds_per_token_min'])} to "
            f"{_ms(row['fixed_seconds_per_token_max'])}), all but weight bytes at reading speed, "
            f"context {row['context_tokens']:,}"
        )
    slow = min(row["read_gb_per_s_min"] for row in report["decode"])
    fast = max(row["read_gb_per_s_max"] for row in report["decode"])
    if fast > _UNSTEADY * slow:
        text.append(
            f"plain reading went from {slow:.3g} to {fast:.3g} GB/s meanwhile: something else uses "
            "this machine, and the figures are rough; ratios to reading suffer least"
        )
    for row in report["sampling"]:
        text.append(
            f"sampling a token of {row['vocab_tokens']:,}: "
            f"{_ms(row['seconds_per_token_median'])} ms"
        )
    return text


def aligned(table: Table) -> list[str]:
    """A table as lines, columns right-aligned."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in table
    ]


def _rates(row: dict[str, Any]) -> tuple[str, str, str]:
    keys = ("tokens_per_second_median", "tokens_per_second_min", "tokens_per_second_max")
    median, least, greatest = (f"{row[key]:.4g}" for key in keys)
    return median, least, greatest


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"
