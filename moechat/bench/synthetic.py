"""``bench --synthetic NAME``: what a model that is not here would do on this machine.

A model of the real shapes and few layers is built with random weights. Parts of it, opened side by
side, have fewer layers of some kind, or a smaller vocabulary: what a layer costs is the difference,
and the whole model the sum of so many of each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moechat.bench.extrapolate import Fit, Spread, extrapolate
from moechat.bench.model import FIRST_CONTEXT, FIRST_PROMPT, ModelSettings, Say, sampling_rows
from moechat.bench.model_bytes import TokenBytes, token_bytes
from moechat.bench.model_machine import machine_facts
from moechat.bench.model_measure import DecodeProbe, growing, prefill_seconds
from moechat.bench.model_pages import populate
from moechat.bench.model_reading import PlainReading
from moechat.bench.model_report import bytes_facts, decode_row, prefill_row
from moechat.bench.synthetic_config import Shape
from moechat.bench.synthetic_cut import NO_WISHES, Cut, Room, Wishes, plan_cut
from moechat.bench.synthetic_folder import (
    Progress,
    SyntheticModel,
    free_disk_bytes,
    free_ram_bytes,
    synthetic_model,
)
from moechat.bench.synthetic_report import extrapolated_rows, whole_facts
from moechat.bench.synthetic_tensors import FORMATS, Recipe, stored_parts, total_bytes
from moechat.engine.engine import Engine
from moechat.errors import ModelNotFound, Usage
from moechat.registry import load_registry

_LEAST_VOCAB = 64
_VOCAB_SHARE = 64  # the small vocabulary is so many times smaller
_MAX_PROMPT_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticSettings(ModelSettings):
    """What to build besides what to measure. ``format`` is one of synthetic_tensors.FORMATS."""

    wishes: Wishes = NO_WISHES
    format: str | None = None
    keep: bool = False


def measure_synthetic(
    name: str, settings: SyntheticSettings, say: Say, progress: Progress
) -> dict[str, Any]:
    """Build, measure, remove; the report. Raises ModelNotFound, Usage or DoesNotFit."""
    whole = _whole_shape(name)
    if settings.format is not None and settings.format not in FORMATS:
        raise Usage(
            f"--format {settings.format[:40]!a} is not possible", f"allowed: {', '.join(FORMATS)}"
        )
    recipe = Recipe.of(whole, settings.format)

    def plan() -> Cut:
        return plan_cut(whole, recipe, settings.wishes, Room(free_ram_bytes(), free_disk_bytes()))

    with (
        synthetic_model(
            whole, recipe, settings.wishes, plan, keep=settings.keep, progress=progress
        ) as (model, notes),
        contextlib.ExitStack() as stack,
    ):
        shapes = _part_shapes(model.shape)
        say("opening")
        engines = [
            stack.enter_context(Engine.open(model.part(shape), threads=settings.threads))
            for shape in shapes
        ]
        reading = PlainReading(sorted(model.path.glob("layer-*.safetensors")), engines[0].threads)
        stack.callback(reading.close)
        say("reading the weights")
        mapped = populate(model.path.rglob("*.safetensors"), free_ram_bytes())
        facts = {
            "bench": "model",
            "model": name,
            "synthetic": True,
            "format": recipe.label,
            "threads": engines[0].threads,
            "instruction_set": engines[0].instruction_set,
            "compute": engines[0].compute,
            "pages_mapped_before": mapped,
            "built": {
                "dense_layers": model.shape.dense_layers,
                "moe_layers": model.shape.moe_layers,
                "experts": model.shape.experts,
                "vocab_tokens": model.shape.vocab,
                "size_bytes": total_bytes(stored_parts(model.shape, recipe)),
                "reused": model.reused,
                "folder": str(model.path) if settings.keep else None,
            },
            "notes": list(notes),
        }
        return facts | _measure(model, whole, shapes, engines, reading, settings, say)


def _whole_shape(name: str) -> Shape:
    entries = load_registry().entries
    if name not in entries:
        known = [key for key, entry in entries.items() if "config" in entry]
        raise ModelNotFound(f"no shapes are called {name[:60]!a}", f"known: {', '.join(known)}")
    return Shape.of_entry(name, entries[name])


def _part_shapes(built: Shape) -> list[Shape]:
    """The built model last; before it those that tell apart what it is made of.

    A small head in those that differ in layers: its time would only add noise.
    """
    small = built.cut(vocab=max(built.vocab // _VOCAB_SHARE, _LEAST_VOCAB))
    if built.dense_layers:
        layers = [(1, 0), (built.dense_layers, 0), (built.dense_layers, built.moe_layers)]
    else:
        layers = [(0, built.period), (0, built.moe_layers)]
    return [*(small.cut(dense_layers=dense, moe_layers=moe) for dense, moe in layers), built]


def counts_of(shape: Shape, vocab: int, dense: bool, head: bool = True) -> dict[str, float]:
    """How many of each part a model has; ``vocab`` is the one whose head counts as 1."""
    counts: dict[str, float] = {"fixed": 1.0}
    if head:
        counts["head"] = shape.vocab / vocab
    if dense:
        counts["dense_layer"] = float(shape.dense_layers)
    return counts | {"moe_layer": float(shape.moe_layers)}


def _measure(
    model: SyntheticModel,
    whole: Shape,
    shapes: Sequence[Shape],
    engines: Sequence[Engine],
    reading: PlainReading,
    settings: SyntheticSettings,
    say: Say,
) -> dict[str, Any]:
    dense, vocab = whole.dense_layers > 0, model.shape.vocab
    # A vocabulary that was cut is a head that was cut: the whole model has so many times more.
    all_counts = counts_of(whole, vocab, dense)
    built_bytes = _bytes_of(model.shape, model.recipe)
    whole_bytes = _bytes_of(whole, model.recipe)
    longest = min(settings.max_context, engines[-1].context_tokens)
    part_counts = [counts_of(shape, vocab, dense) for shape in shapes]
    decode, decode_whole = [], []
    for context in (0, *growing(FIRST_CONTEXT, longest - 1)):
        if context + 1 >= engines[-1].context_tokens:
            continue
        say(f"decode at {context:,} tokens")
        rounds, reads, tokens = _decode_rounds(engines, context, reading, settings.repetitions)
        built = [seconds[-1] for seconds in rounds]
        beside = [read[-1] for read in reads]
        decode.append(decode_row(context, tokens, built, beside, built_bytes))
        fit = extrapolate(part_counts, at_one_speed(rounds, reads), all_counts)
        decode_whole.append((context, fit, [read for row in reads for read in row]))
    prefill, prefill_whole = _prefill(engines[:-1], shapes[:-1], whole, longest, settings, say)
    return {
        "bytes": bytes_facts(built_bytes),
        "prefill": prefill,
        "decode": decode,
        "sampling": sampling_rows(model.shape.vocab),
        "whole": {
            **whole_facts(whole, total_bytes(stored_parts(whole, model.recipe))),
            "bytes": bytes_facts(whole_bytes),
            **extrapolated_rows(decode_whole, prefill_whole, whole_bytes),
        },
        **machine_facts(),
    }


def _decode_rounds(
    engines: Sequence[Engine], context: int, reading: PlainReading, repetitions: int
) -> tuple[list[list[float]], list[list[float]], int]:
    """Seconds a token and the reading beside them, by round and part; the last's tokens."""
    probes = [DecodeProbe(engine, context) for engine in engines]
    rounds, reads = [], []
    before = reading.burst()
    for _ in range(repetitions):
        seconds, beside = [], []
        for probe in probes:
            seconds.append(probe.seconds_per_token())
            after = reading.burst()
            beside.append((before + after) / 2)
            before = after
        rounds.append(seconds)
        reads.append(beside)
    for probe in probes:
        probe.close()
    return rounds, reads, probes[-1].tokens


def at_one_speed(rounds: list[list[float]], reads: list[list[float]]) -> list[list[float]]:
    """The seconds as they would be had memory been as fast as its median all the time.

    Decode waits for memory, whose speed on shared machines changes by a factor of two meanwhile.
    """
    usual = Spread.of([read for beside in reads for read in beside]).median
    return [
        [took * read / usual for took, read in zip(seconds, beside)]
        for seconds, beside in zip(rounds, reads)
    ]


def _prefill(
    engines: Sequence[Engine],
    shapes: Sequence[Shape],
    whole: Shape,
    longest: int,
    settings: SyntheticSettings,
    say: Say,
) -> tuple[list[dict[str, Any]], list[tuple[int, Fit]]]:
    """Rows of the built model, and the fit of each length. No logits are computed: no head."""
    dense = whole.dense_layers > 0
    counts = [counts_of(shape, shape.vocab, dense, head=False) for shape in shapes]
    all_counts = counts_of(whole, whole.vocab, dense, head=False)
    rows, fits = [], []
    for tokens in growing(FIRST_PROMPT, longest):
        say(f"prefill of {tokens:,} tokens")
        warm = prefill_seconds(engines[-1], tokens)
        rounds = [
            [prefill_seconds(engine, tokens, 1 + seed) for engine in engines]
            for seed in range(settings.repetitions)
        ]
        rows.append(prefill_row(tokens, [seconds[-1] for seconds in rounds]))
        fits.append((tokens, extrapolate(counts, rounds, all_counts)))
        if 4 * min(warm, rounds[-1][-1]) > _MAX_PROMPT_SECONDS:
            break
    return rows, fits


def _bytes_of(shape: Shape, recipe: Recipe) -> TokenBytes:
    return token_bytes(
        ((part.role, part.num_bytes) for part in stored_parts(shape, recipe)),
        experts=shape.experts,
        chosen=shape.geometry["num_experts_per_token"],
        vocab=shape.vocab,
        tied=shape.geometry["tied_embeddings"],
    )
