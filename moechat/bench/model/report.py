"""Figures of ``bench model`` as JSON rows, units in the keys, and as a text for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from moechat.bench.amounts import figure
from moechat.bench.bursts import Burst, Spread, Work, read_keys
from moechat.bench.doubts import busy_before, unsteady_reading
from moechat.bench.model.probes import sampling_seconds
from moechat.bench.model.weight_bytes import TokenBytes
from moechat.bench.table import Bar, Table, Text
from moechat.sizes import size_text

_REFERENCE_VOCAB = 129_280  # DeepSeek-V3's: sampling is wanted within 0.3 ms there
_LEAST_SHARE = 0.005  # of phases that the text names
_RATE_HEAD = ("TOK/S", "MIN", "MAX")
_DECODE_LEGEND = (
    "FIXED MS: a token beyond plain reading of its bytes; GB/s: weight bytes; READING: plain "
    "reading between the bursts, GB/s; OF READING: of a burst to the reading around it. Medians, "
    "each column's own"
)
_PHASE_LEGEND = (
    "Of one more burst, under profiling. SERIAL MS: before the tasks of a phase, besides MS; "
    "IMBALANCE: the busiest thread over the mean, 1 is even; outside the threads: the rest of the "
    "time"
)

_DEVICE_LEGEND = "As that burst counted itself; copies of weights run beside the layers"


def seconds_keys(name: str, spread: Spread) -> dict[str, float]:
    """``name``_median, _min and _max."""
    return spread.keys(name, "_median")


def rate_keys(tokens: int, seconds: Spread) -> dict[str, float]:
    """Tokens a second of ``tokens`` in so many seconds."""
    rate = Spread(tokens / seconds.median, tokens / seconds.max, tokens / seconds.min)
    return rate.keys("tokens_per_second", "_median")


def prefill_row(tokens: int, works: Sequence[Work], phases: list[dict[str, Any]]) -> dict[str, Any]:
    """One length of prompt."""
    spread = Spread.of([work.seconds for work in works])
    return {
        "prompt_tokens": tokens,
        **seconds_keys("seconds", spread),
        **rate_keys(tokens, spread),
        "phases": phases,
    }


def decode_row(
    context: int, bursts: Sequence[Burst], phases: list[dict[str, Any]]
) -> dict[str, Any]:
    """One context. The calls of a burst are tokens."""
    spread = Spread.of([burst.seconds_per_call for burst in bursts])
    fixed = Spread.of([burst.fixed_seconds_per_call for burst in bursts])
    return {
        "context_tokens": context,
        "tokens_a_burst": bursts[0].work.calls,
        **seconds_keys("seconds_per_token", spread),
        **rate_keys(1, spread),
        **read_keys(bursts),
        **seconds_keys("fixed_seconds_per_token", fixed),
        "phases": phases,
    }


def bytes_facts(num_bytes: TokenBytes) -> dict[str, int]:
    """Weight bytes of one decoded token."""
    return {
        "routed_bytes_per_token": num_bytes.routed,
        "head_bytes_per_token": num_bytes.head,
        "weight_bytes_per_token": num_bytes.total,
    }


def sampling_rows(vocab: int) -> list[dict[str, Any]]:
    """Drawing one token, at the model's vocabulary and at DeepSeek-V3's."""
    return [
        {
            "vocab_tokens": size,
            **seconds_keys("seconds_per_token", Spread.of(sampling_seconds(size))),
        }
        for size in dict.fromkeys((vocab, _REFERENCE_VOCAB))
    ]


def model_text(report: dict[str, Any]) -> Text:
    """The report for people."""
    return [*facts(report), *tables(report)]


def facts(report: dict[str, Any]) -> list[str]:
    """What the tables do not say, one fact a line."""
    sizes, row, bursts = report["bytes"], report["decode"][0], report["repetitions"]
    least, most = (ms(row[f"fixed_seconds_per_token_{end}"]) for end in ("min", "max"))
    fixed_range = f" ({least} to {most})" if bursts > 1 else ""
    built = ", as built" if report["synthetic"] else ""
    threads = f"{report['threads']} thread{'s' * (report['threads'] != 1)}"
    reader = report.get("prefill_device", "cpu")
    prompts = "" if reader == "cpu" else f"prompts read by {reader}, "
    text = [
        f"{report['model']}: {threads}, {report['instruction_set']}, {prompts}"
        f"{report['machine']['cpu'] or 'unknown processor'}; "
        + (f"medians of {bursts} bursts" if bursts > 1 else "one burst a figure"),
        f"bytes a token{built}: {size_text(sizes['weight_bytes_per_token'])} of weights, "
        f"{size_text(sizes['routed_bytes_per_token'])} of them routed experts, "
        f"{size_text(sizes['head_bytes_per_token'])} the head",
        f"fixed cost a token{built}: {ms(row['fixed_seconds_per_token_median'])} ms{fixed_range}, "
        f"what it takes beyond plain reading of its bytes, context {row['context_tokens']:,}",
        *(f"note: {note}" for note in report["notes"]),
        *unsteady_reading(report["decode"]),
        *busy_before(report["machine"]),
    ]
    for row in report["sampling"]:
        whose = " (DeepSeek's vocabulary)" if row["vocab_tokens"] == _REFERENCE_VOCAB else ""
        text.append(
            f"sampling a token of {row['vocab_tokens']:,}{whose}: "
            f"{ms(row['seconds_per_token_median'])} ms"
        )
    return text


def tables(report: dict[str, Any]) -> list[Table]:
    """Prefill, decode, and the phases of one row of each."""
    prefill, decode = report["prefill"], report["decode"]
    head = ("CONTEXT", *_RATE_HEAD, "FIXED MS", "GB/S", "READING", "OF READING")
    cells = [
        (
            f"{row['context_tokens']:,}",
            *rate_cells(row),
            ms(row["fixed_seconds_per_token_median"]),
            figure(row["weight_gb_per_s"]),
            figure(row["read_gb_per_s"]),
            Bar(row["fraction_of_read"]),
        )
        for row in decode
    ]
    context, prompt = decode[0]["context_tokens"], prefill[-1]["prompt_tokens"]
    reader = report.get("prefill_device", "cpu")
    return [
        prefill_table("prefill", prefill),
        Table("decode", head, cells, legend=_DECODE_LEGEND),
        replace(
            _phase_table(f"phases of a token, context {context:,}", decode[0]["phases"], "token"),
            legend=_PHASE_LEGEND,
        ),
        replace(
            _phase_table(
                f"phases of a prompt of {prompt:,}",
                prefill[-1]["phases"],
                "prompt",
                rest="outside the threads" if reader == "cpu" else "the rest",
            ),
            legend="" if reader == "cpu" else _DEVICE_LEGEND,
        ),
    ]


def prefill_table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Rates of prompts."""
    cells = [
        (f"{row['prompt_tokens']:,}", *rate_cells(row), figure(row["seconds_median"], 4))
        for row in rows
    ]
    return Table(title, ("PROMPT", *_RATE_HEAD, "SECONDS"), cells)


def _phase_table(
    title: str, phases: list[dict[str, Any]], unit: str, rest: str = "outside the threads"
) -> Table:
    """``SERIAL``: before a phase's tasks; ``IMBALANCE``: the busiest thread over the mean.

    ``rest``: what the phases leave of the time.
    """
    cells: list[tuple[str | Bar, ...]] = [
        (
            phase["phase"],
            figure(phase[f"ms_per_{unit}"]),
            "-" if (serial := phase[f"open_ms_per_{unit}"]) is None else figure(serial),
            "-" if phase["imbalance"] is None else f"{phase['imbalance']:.2f}",
            Bar(phase["share_of_time"]),
        )
        for phase in phases
        if phase["share_of_time"] >= _LEAST_SHARE
    ]
    left = 1 - sum(phase["share_of_time"] for phase in phases)
    cells.append((rest, "", "", "", Bar(max(left, 0.0))))
    head = ("PHASE", "MS", "SERIAL MS", "IMBALANCE", "OF TIME")
    return Table(title, head, cells, frozenset({"PHASE"}))


def rate_cells(row: dict[str, Any]) -> tuple[str, str, str]:
    """Below TOK/S, MIN and MAX; a single burst has no range."""
    median, least, greatest = (row[f"tokens_per_second_{end}"] for end in ("median", "min", "max"))
    if least == greatest:
        return figure(median, 4), "-", "-"
    return figure(median, 4), figure(least, 4), figure(greatest, 4)


def ms(seconds: float | None) -> str:
    """Milliseconds."""
    return "-" if seconds is None else figure(1e3 * seconds)
