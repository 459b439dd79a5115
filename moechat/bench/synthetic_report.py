"""The part of a synthetic model's report that is extrapolated, as rows and as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moechat.bench.extrapolate import Fit, Spread
from moechat.bench.model_bytes import TokenBytes
from moechat.bench.model_report import Table, rate_keys, rounded, seconds_keys
from moechat.bench.synthetic_config import Shape

# How the text calls the parts that a fit tells apart.
_PARTS = {
    "moe_layer": "a layer with experts",
    "dense_layer": "a dense layer",
    "head": "head and sampling",
    "fixed": "fixed, whatever the layers",
}


def whole_facts(whole: Shape, size_bytes: int) -> dict[str, Any]:
    """What the whole model is."""
    return {
        "dense_layers": whole.dense_layers,
        "moe_layers": whole.moe_layers,
        "experts": whole.experts,
        "vocab_tokens": whole.vocab,
        "size_bytes": size_bytes,
    }


def extrapolated_rows(
    decode: Sequence[tuple[int, Fit, Sequence[float]]],
    prefill: Sequence[tuple[int, Fit]],
    num_bytes: TokenBytes,
) -> dict[str, Any]:
    """Measured seconds of each part, and tokens a second of the whole model from them."""
    decode_rows = []
    for context, fit, reads in decode:
        at_reading_speed = num_bytes.total / Spread.of(reads).median
        decode_rows.append(
            {
                "context_tokens": context,
                "measured": _parts(fit, "seconds_per_token"),
                "extrapolated": {
                    **seconds_keys("seconds_per_token", fit.whole),
                    **rate_keys(1, fit.whole),
                    "weight_gb_per_s": rounded(num_bytes.total / fit.whole.median / 1e9),
                    "fraction_of_read": rounded(at_reading_speed / fit.whole.median),
                    "fixed_seconds_per_token": rounded(fit.whole.median - at_reading_speed),
                },
            }
        )
    prefill_rows = [
        {
            "prompt_tokens": tokens,
            "measured": _parts(fit, "seconds"),
            "extrapolated": {
                **seconds_keys("seconds", fit.whole),
                **rate_keys(tokens, fit.whole),
            },
        }
        for tokens, fit in prefill
    ]
    return {"decode": decode_rows, "prefill": prefill_rows}


def _parts(fit: Fit, unit: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for part, spread in fit.parts.items():
        found |= seconds_keys(f"{part}_{unit}", spread)
    return found


def synthetic_tables(report: dict[str, Any]) -> list[tuple[str, Table]]:
    """The tables of ``whole`` for people, each with its title."""
    whole = report["whole"]
    measured: Table = [("CONTEXT", *(part.replace("_", " ").upper() for part in _PARTS))]
    for row in whole["decode"]:
        cells = [_ms(row["measured"].get(f"{part}_seconds_per_token_median")) for part in _PARTS]
        measured.append((f"{row['context_tokens']:,}", *cells))
    decode: Table = [("CONTEXT", "TOK/S", "MIN", "MAX", "MS/TOKEN", "GB/S", "OF READ")]
    for row in whole["decode"]:
        facts = row["extrapolated"]
        decode.append(
            (
                f"{row['context_tokens']:,}",
                *_rates(facts),
                _ms(facts["seconds_per_token_median"]),
                f"{facts['weight_gb_per_s']:.3g}",
                f"{facts['fraction_of_read']:.2f}",
            )
        )
    tables = [
        ("measured: milliseconds a token of each part, by differences between cuts", measured),
        (f"extrapolated: decode of all of {report['model']}", decode),
    ]
    if whole["prefill"]:
        prefill: Table = [("PROMPT", "TOK/S", "MIN", "MAX", "SECONDS")]
        for row in whole["prefill"]:
            facts = row["extrapolated"]
            prefill.append(
                (
                    f"{row['prompt_tokens']:,}",
                    *_rates(facts),
                    f"{facts['seconds_median']:.4g}",
                )
            )
        tables.append((f"extrapolated: prefill of all of {report['model']}", prefill))
    return tables


def synthetic_lines(report: dict[str, Any]) -> list[str]:
    """What was built, what is measured and what is not."""
    built, whole = report["built"], report["whole"]
    free_bytes = report["machine"]["memory_bytes"]
    text = [
        f"built, with random weights in {report['format']}: {built['dense_layers']} of "
        f"{whole['dense_layers']} dense layers and {built['moe_layers']} of "
        f"{whole['moe_layers']} layers with experts, {built['size_bytes'] / 1e9:.2f} GB"
        + (", kept from an earlier run" if built["reused"] else ""),
        *(f"note: {note}" for note in report["notes"]),
        f"the whole model: {whole['size_bytes'] / 1e9:.1f} GB, "
        f"{whole['bytes']['weight_bytes_per_token'] / 1e9:.2f} GB a token, "
        f"{whole['bytes']['routed_bytes_per_token'] / 1e9:.2f} GB of them routed experts",
    ]
    if whole["size_bytes"] > free_bytes:
        text.append(
            f"extrapolated figures hold for a machine like this one with memory for all of it; "
            f"this one has {free_bytes / 1e9:.0f} GB"
        )
    if built["folder"]:
        text.append(f"kept in {built['folder']}")
    return text


def _rates(facts: dict[str, Any]) -> tuple[str, str, str]:
    keys = ("tokens_per_second_median", "tokens_per_second_min", "tokens_per_second_max")
    median, least, greatest = (f"{facts[key]:.4g}" for key in keys)
    return median, least, greatest


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.3g}"
