"""What is extrapolated to the whole model, as rows, and the text of a synthetic model's report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moechat.bench.amounts import figure
from moechat.bench.bursts import rounded
from moechat.bench.doubts import disagreeing_parts
from moechat.bench.model.report import (
    facts,
    ms,
    prefill_table,
    rate_cells,
    rate_keys,
    seconds_keys,
    tables,
)
from moechat.bench.model.weight_bytes import TokenBytes
from moechat.bench.synthetic.extrapolate import Fit
from moechat.bench.table import Bar, Table, Text
from moechat.sizes import size_text

# How the text calls the parts that a fit tells apart.
_PARTS = {
    "moe_layer": "MOE LAYER",
    "dense_layer": "DENSE LAYER",
    "head": "HEAD",
    "outside_layers": "OUTSIDE",
}


def whole_decode_row(
    context: int, fit: Fit, read_bytes_per_second: float, num_bytes: TokenBytes
) -> dict[str, Any]:
    """Measured seconds of each part, and what the whole model would do at that speed of memory."""
    at_reading_speed = num_bytes.total / read_bytes_per_second
    return {
        "context_tokens": context,
        "measured": _parts(fit, "seconds_per_token"),
        "extrapolated": {
            **seconds_keys("seconds_per_token", fit.whole),
            **rate_keys(1, fit.whole),
            "weight_gb_per_s": rounded(num_bytes.total / fit.whole.median / 1e9),
            "fraction_of_read": rounded(at_reading_speed / fit.whole.median),
            "beyond_reading_seconds_per_token": rounded(fit.whole.median - at_reading_speed),
        },
    }


def whole_prefill_row(tokens: int, fit: Fit) -> dict[str, Any]:
    """Likewise of a prompt."""
    return {
        "prompt_tokens": tokens,
        "measured": _parts(fit, "seconds"),
        "extrapolated": {**seconds_keys("seconds", fit.whole), **rate_keys(tokens, fit.whole)},
    }


def _parts(fit: Fit, unit: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for part, spread in fit.parts.items():
        found |= seconds_keys(f"{part}_{unit}", spread)
    return found


def synthetic_text(report: dict[str, Any]) -> Text:
    """The report for people: what was built, what is measured and what is not."""
    built, whole = report["built"], report["whole"]
    memory_bytes = report["machine"]["memory_bytes"]
    dense = ""
    if whole["dense_layers"]:
        dense = f"{built['dense_layers']} of {whole['dense_layers']} dense layers and "
    text: Text = [
        *facts(report),
        f"built, with random weights in {report['format']}: {dense}{built['moe_layers']} of "
        f"{whole['moe_layers']} layers with experts, {size_text(built['size_bytes'])}",
        f"the whole model: {size_text(whole['size_bytes'])}, "
        f"{size_text(whole['bytes']['weight_bytes_per_token'])} a token, "
        f"{size_text(whole['bytes']['routed_bytes_per_token'])} of them routed experts",
    ]
    text += disagreeing_parts(report)
    if whole["size_bytes"] > memory_bytes:
        text.append(
            "extrapolated figures hold for a machine like this one with memory for all of it; "
            f"this one has {size_text(memory_bytes)}"
        )
    measured = [replace(t, title=f"measured, as built: {t.title}") for t in tables(report)]
    return [*text, *measured, *_whole_tables(report["model"], whole)]


def _whole_tables(name: str, whole: dict[str, Any]) -> list[Table]:
    dense = whole["dense_layers"] > 0
    known = {part: head for part, head in _PARTS.items() if part != "dense_layer" or dense}
    parts = [
        (
            f"{row['context_tokens']:,}",
            *(ms(row["measured"].get(f"{part}_seconds_per_token_median")) for part in known),
        )
        for row in whole["decode"]
    ]
    decode = [
        (
            f"{row['context_tokens']:,}",
            *rate_cells(row["extrapolated"]),
            ms(row["extrapolated"]["seconds_per_token_median"]),
            figure(row["extrapolated"]["weight_gb_per_s"]),
            Bar(row["extrapolated"]["fraction_of_read"]),
        )
        for row in whole["decode"]
    ]
    prefill = [row | row["extrapolated"] for row in whole["prefill"]]
    return [
        Table(
            "measured: milliseconds a token of one of each part, by differences between cuts;\n"
            "OUTSIDE: what is neither in a layer nor the head",
            ("CONTEXT", *known.values()),
            parts,
        ),
        Table(
            f"extrapolated: decode of all of {name}",
            ("CONTEXT", "TOK/S", "MIN", "MAX", "MS/TOKEN", "GB/S", "OF READING"),
            decode,
        ),
        prefill_table(f"extrapolated: prefill of all of {name}", prefill),
    ]
