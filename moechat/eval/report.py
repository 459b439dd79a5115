"""Figures as JSON rows, units in the keys, and as texts for people."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from moechat.bench.amounts import figure
from moechat.bench.machine import machine_facts
from moechat.bench.table import Table, Text
from moechat.engine.engine import Engine
from moechat.eval.crossing import Traffic
from moechat.eval.kv import Row
from moechat.eval.likelihood import Likelihood, change
from moechat.eval.needle import Result
from moechat.eval.ppl import Perplexity
from moechat.terminal.neutralise import one_line

_SHOWN_MISSES = 5
_SHOWN_CHARACTERS = 60
_KV_LEGEND = (
    "OF FP16: bytes sent, scales included, over 2 bytes an element; CHANGE: of perplexity, against "
    "native on the same windows, and one standard error; ENCODE, DECODE: ms for 1,000 tokens, of "
    "all texts the median"
)


def frame(evaluation: str, engine: Engine) -> dict[str, Any]:
    """What a report begins with."""
    return {
        "evaluation": evaluation,
        "model": engine.name,
        "threads": engine.threads,
        "instruction_set": engine.instruction_set,
        "compute": engine.compute,
        "context_tokens": engine.context_tokens,
        **machine_facts(),
    }


def reader(engine: Engine) -> dict[str, str]:
    """What read the texts, for a report; to be asked once all are read."""
    return {"prefill_device": engine.prefill_choice.names_used}


def ppl_report(found: Perplexity) -> dict[str, Any]:
    """Of ``eval ppl``."""
    return {
        f"{found.unit}s": len(found.windows),
        f"{found.unit}s_of": found.num_windows,
        f"{found.unit}s_too_long": found.too_long,
        **_likelihood_keys(found.total),
    }


def ppl_text(report: dict[str, Any]) -> Text:
    """For people."""
    unit = "chat" if "chats" in report else "window"
    done, of, tokens = report[f"{unit}s"], report[f"{unit}s_of"], report["predicted_tokens"]
    text: Text = [
        *heading(report),
        f"perplexity {figure(report['perplexity'], 5)} over "
        f"{_counted(tokens, tokens, 'token')} in {_counted(done, of, unit)}",
    ]
    if left_out := report[f"{unit}s_too_long"]:
        are = "is" if left_out == 1 else "are"
        counted = _counted(left_out, left_out, unit)
        text.append(f"{counted} {are} longer than the context and left out")
    return text


def needle_rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """One for each length, in order: how many were found, and what was answered instead."""
    lengths = dict.fromkeys(result.trial.length_tokens for result in results)
    return [
        {
            "length_tokens": length,
            "trials": len(own),
            "found": sum(result.found for result in own),
            "misses": [_miss(result) for result in own if not result.found],
        }
        for length in lengths
        if (own := [result for result in results if result.trial.length_tokens == length])
    ]


def needle_text(report: dict[str, Any]) -> Text:
    """For people."""
    rows = [
        (f"{row['length_tokens']:,}", f"{row['found']} of {row['trials']}")
        for row in report["needles"]
    ]
    text: Text = [*heading(report), Table("", ("TOKENS", "FOUND"), rows)]
    misses = [(row, miss) for row in report["needles"] for miss in row["misses"]]
    for row, miss in misses[:_SHOWN_MISSES]:
        answer = one_line(miss["answer"])[:_SHOWN_CHARACTERS]
        text.append(
            f"missed at {miss['depth_percent']:g} % of {row['length_tokens']:,} tokens: "
            f"{miss['code']}; the answer was: {answer}"
        )
    if len(misses) > _SHOWN_MISSES:
        text.append(f"{len(misses) - _SHOWN_MISSES} more misses are in --json")
    return text


def kv_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One for each policy and budget of which something is known."""
    native = next((row.windows for row in rows if row.policy.name == "native"), [])
    return [
        {
            "policy": row.policy.name,
            "budget": row.policy.budget,
            **_traffic_keys(row.crossings),
            "windows": len(row.windows),
            **_quality_keys(native, row.windows),
            "needles": needle_rows(row.needles),
        }
        for row in rows
        if not row.is_empty
    ]


def kv_text(report: dict[str, Any]) -> Text:
    """For people."""
    rows = report["rows"]
    text = heading(report)
    most = max((row["windows"] for row in rows), default=0)
    text += [
        f"{label(row)}: only {_counted(row['windows'], most, 'window')} of the text"
        for row in rows
        if row["windows"] < most
    ]
    if rows:
        head = ("POLICY", "BYTES/TOKEN", "OF FP16", "PPL", "CHANGE", "ENCODE", "DECODE")
        left = frozenset({"POLICY"})
        text.append(Table("bytes and perplexity", head, _kv_table(rows), left, _KV_LEGEND))
    lengths = list(dict.fromkeys(n["length_tokens"] for row in rows for n in row["needles"]))
    if lengths:
        columns = ("POLICY", *(f"{length:,}" for length in lengths))
        cells = [(label(row), *_needle_cells(row, lengths)) for row in rows]
        title = "needles found, by tokens of text"
        text.append(Table(title, columns, cells, frozenset({"POLICY"})))
    return text


def label(row: dict[str, Any]) -> str:
    """What a row of ``eval kv`` is called."""
    return row["policy"] if row["budget"] is None else f"{row['policy']} {row['budget']:g}"


def needles_found(row: dict[str, Any]) -> tuple[int, int]:
    """Found and tried, over all lengths."""
    found = sum(needle["found"] for needle in row["needles"])
    return found, sum(needle["trials"] for needle in row["needles"])


def _kv_table(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """As many decimals for all perplexities as the least one needs for five digits."""
    known = [row["perplexity"] for row in rows if row["perplexity"] is not None]
    digits_before_point = len(f"{min(known, default=1.0):.0f}")
    return [_kv_cells(row, max(5 - digits_before_point, 0)) for row in rows]


def _kv_cells(row: dict[str, Any], decimals: int) -> tuple[str, ...]:
    percent, error = (
        row["perplexity_change_percent"],
        row["perplexity_change_standard_error_percent"],
    )
    change_text = "-" if percent is None else f"{percent:+.2f} %"
    if error is not None and row["policy"] != "native":
        change_text += f" ± {error:.2f}"
    return (
        label(row),
        f"{row['sent_bytes_per_token']:,.0f}",
        f"{row['sent_of_fp16']:.3f}",
        "-" if row["perplexity"] is None else f"{row['perplexity']:.{decimals}f}",
        change_text,
        f"{row['encode_seconds_per_token'] * 1e6:.2f}",
        f"{row['decode_seconds_per_token'] * 1e6:.2f}",
    )


def _needle_cells(row: dict[str, Any], lengths: Sequence[int]) -> list[str]:
    known = {needle["length_tokens"]: needle for needle in row["needles"]}
    return [
        f"{known[length]['found']}/{known[length]['trials']}" if length in known else "-"
        for length in lengths
    ]


def _traffic_keys(crossings: Sequence[Traffic]) -> dict[str, Any]:
    """Seconds are medians: one crossing that something else disturbed would spoil a sum."""
    traffic = sum(crossings, Traffic())
    tokens = max(traffic.tokens, 1)
    encode = [each.encode_seconds / max(each.tokens, 1) for each in crossings]
    decode = [each.decode_seconds / max(each.tokens, 1) for each in crossings]
    return {
        "crossed_tokens": traffic.tokens,
        "sent_bytes": traffic.num_bytes,
        "fp16_bytes": traffic.native_bytes,
        "sent_bytes_per_token": round(traffic.num_bytes / tokens, 2),
        "sent_of_fp16": round(traffic.num_bytes / max(traffic.native_bytes, 1), 5),
        "encode_seconds_per_token": statistics.median(encode) if encode else 0.0,
        "decode_seconds_per_token": statistics.median(decode) if decode else 0.0,
    }


def _quality_keys(native: Sequence[Likelihood], own: Sequence[Likelihood]) -> dict[str, Any]:
    total = sum(own, Likelihood())
    against = change(native, own)
    return {
        **_likelihood_keys(total),
        "perplexity_change_percent": None if against is None else against.percent,
        "perplexity_change_standard_error_percent": (
            None if against is None else against.standard_error_percent
        ),
    }


def _likelihood_keys(total: Likelihood) -> dict[str, Any]:
    return {
        "perplexity": total.perplexity if total.tokens else None,
        "nats_per_token": total.nats / total.tokens if total.tokens else None,
        "predicted_tokens": total.tokens,
    }


def _miss(result: Result) -> dict[str, Any]:
    return {
        "depth_percent": result.trial.depth_percent,
        "code": result.trial.code,
        "answer": result.answer,
    }


def heading(report: dict[str, Any]) -> Text:
    """The first lines of every report for people."""
    threads = report["threads"]
    facts = f"{one_line(report['model'])}, {report['compute']}, {threads} thread"
    facts += "s" * (threads != 1)
    if device := report.get("prefill_device"):
        facts += f", read by {device}"
    text: Text = [facts]
    text += [one_line(note) for note in report["notes"]]
    return text


def _counted(done: int, of: int, unit: str) -> str:
    counted = f"{done:,}" if done == of else f"{done:,} of {of:,}"
    return f"{counted} {unit}{'s' * (of != 1)}"
