"""The measurement: a model is built, its parts take turns, and the whole one is extrapolated."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from moechat.bench.amounts import shown
from moechat.bench.bursts import Spread
from moechat.bench.machine import available_memory_bytes
from moechat.bench.model.measure import Turns
from moechat.bench.model.report import bytes_facts, decode_row, prefill_row, sampling_rows
from moechat.bench.model.weight_bytes import TokenBytes, token_bytes
from moechat.bench.settings import ModelSettings, model_entry
from moechat.bench.status_line import Show, written_bytes
from moechat.bench.synthetic.config import Shape
from moechat.bench.synthetic.cut import Room, plan_cut
from moechat.bench.synthetic.extrapolate import at_one_speed, extrapolate
from moechat.bench.synthetic.folder import (
    SyntheticModel,
    make_room,
    synthetic_model,
    synthetic_root,
)
from moechat.bench.synthetic.report import whole_decode_row, whole_prefill_row
from moechat.bench.synthetic.tensors import Recipe, stored_parts, total_bytes
from moechat.engine.engine import Engine
from moechat.sizes import size_text

_LEAST_VOCAB = 64
_VOCAB_SHARE = 64  # the small vocabulary is so many times smaller


def measure_synthetic(
    name: str, settings: ModelSettings, show: Show, say: Show = lambda line: None
) -> dict[str, Any]:
    """Build, measure, remove; the report. Raises ModelNotFound, Usage or DoesNotFit.

    ``say`` is told what will be written where.
    """
    whole = Shape.of_entry(name, model_entry(name))
    recipe = Recipe.of(whole, settings.format)
    room = Room(ram_bytes=available_memory_bytes(), disk_bytes=make_room())
    cut = plan_cut(whole, recipe, settings.layers, settings.experts, room)
    say(
        f"about {size_text(cut.num_bytes)} go to {shown(synthetic_root())}, "
        "removed at the end; --layers and --experts make it smaller"
    )
    progress = written_bytes(show, "writing random weights")
    with synthetic_model(cut.shape, recipe, progress) as model, ExitStack() as stack:
        shapes = part_shapes(model.shape)
        show("opening")
        engines = [
            stack.enter_context(Engine.open(model.part(shape), threads=settings.threads))
            for shape in shapes
        ]
        files = {path.resolve() for path in model.path.rglob("*.safetensors")}
        parts_bytes = [_bytes_of(shape, recipe).total for shape in shapes]
        turns = Turns(engines, sorted(files), parts_bytes, settings, show)
        frame = turns.frame(name)
        frame["notes"][:0] = cut.notes
        return {
            **frame,
            "synthetic": True,
            "format": recipe.label,
            "built": _facts(model.shape, recipe),
            "bytes": bytes_facts(_bytes_of(model.shape, recipe)),
            **_measure(turns, model, whole, shapes, engines),
            "sampling": sampling_rows(model.shape.vocab),
        }


def _facts(shape: Shape, recipe: Recipe) -> dict[str, int]:
    return {
        "dense_layers": shape.dense_layers,
        "moe_layers": shape.moe_layers,
        "experts": shape.experts,
        "vocab_tokens": shape.vocab,
        "size_bytes": total_bytes(stored_parts(shape, recipe)),
    }


def part_shapes(built: Shape) -> list[Shape]:
    """The built model last; before it those that tell apart what it is made of.

    A small head in those that differ in layers: its time would only add noise.
    """
    small = built.cut(vocab=max(built.vocab // _VOCAB_SHARE, _LEAST_VOCAB))
    if built.dense_layers:
        layers = [(1, 0), (built.dense_layers, 0), (built.dense_layers, built.moe_layers)]
    else:
        layers = [(0, built.period), (0, built.moe_layers)]
    return [*(small.cut(dense_layers=dense, moe_layers=moe) for dense, moe in layers), built]


def counts_of(shape: Shape, vocab: int, head: bool = True) -> dict[str, float]:
    """How many of each part a model has; ``vocab`` is the one whose head counts as 1."""
    counts: dict[str, float] = {"outside_layers": 1.0}
    if head:
        counts["head"] = shape.vocab / vocab
    if shape.geometry["num_dense_layers"]:
        counts["dense_layer"] = float(shape.dense_layers)
    return counts | {"moe_layer": float(shape.moe_layers)}


def _measure(
    turns: Turns,
    model: SyntheticModel,
    whole: Shape,
    shapes: Sequence[Shape],
    engines: Sequence[Engine],
) -> dict[str, Any]:
    vocab = model.shape.vocab
    whole_bytes = _bytes_of(whole, model.recipe)
    decode, whole_decode = [], []
    counts = [counts_of(shape, vocab) for shape in shapes]
    for context, bursts, phases in turns.decode():
        decode.append(decode_row(context, bursts[-1], phases))
        fit = extrapolate(counts, at_one_speed(bursts), counts_of(whole, vocab))
        read = Spread.of([burst.read_bytes_per_second for part in bursts for burst in part])
        whole_decode.append(whole_decode_row(context, fit, read.median, whole_bytes))
    # No logits are computed of a prompt: the part with a large head would be no other.
    prefill, whole_prefill = [], []
    counts = [counts_of(shape, vocab, head=False) for shape in shapes[:-1]]
    for tokens, works, phases in turns.prefill(engines[:-1]):
        prefill.append(prefill_row(tokens, works[-1], phases))
        seconds = [[work.seconds for work in part] for part in zip(*works, strict=True)]
        fit = extrapolate(counts, seconds, counts_of(whole, vocab, head=False))
        whole_prefill.append(whole_prefill_row(tokens, fit))
    return {
        "prefill": prefill,
        "decode": decode,
        "whole": {
            **_facts(whole, model.recipe),
            "bytes": bytes_facts(whole_bytes),
            "decode": whole_decode,
            "prefill": whole_prefill,
        },
    }


def _bytes_of(shape: Shape, recipe: Recipe) -> TokenBytes:
    return token_bytes(
        ((part.role, part.num_bytes) for part in stored_parts(shape, recipe)),
        experts=shape.experts,
        chosen=shape.geometry["num_experts_per_token"],
        vocab=shape.vocab,
        tied=shape.geometry["tied_embeddings"],
    )
