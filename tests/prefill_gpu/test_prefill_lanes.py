"""Streamed prefill over several lanes, on torch's CPU device: against the oracles, and one lane."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np
import pytest
from oracles import ORACLE_NAMES

from moechat import _native

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")
from plain_source import PlainSource  # noqa: E402
from prefill_contract import (  # noqa: E402
    EXACT_BOUND,
    NEVER,
    append,
    check_choice,
    check_default_mode_error,
    check_exact_mode,
    native,
    new_cache,
    run,
    want,
)
from test_stream_prefill import ALIKE, streamed  # noqa: E402

from moechat.errors import NonFiniteLogits  # noqa: E402
from moechat.prefill.gpu.lanes import run_lanes  # noqa: E402
from moechat.prefill.gpu.stream_prefill import StreamPrefill  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_torch_thread")


class ShareSource(PlainSource):
    """The experts [first, end) alone, and everything else."""

    def __init__(self, name, compute, first, end, **settings):
        super().__init__(name, compute, **settings)
        self.share = range(first, end)

    def expert_groups(self, layer):
        for group in super().expert_groups(layer):
            size = len(group.gate)
            kept = [e - group.first for e in range(group.first, group.first + size)]
            kept = [index for index in kept if index + group.first in self.share]
            if kept:
                parts = {
                    field.name: getattr(group, field.name)
                    for field in dataclasses.fields(group)
                    if isinstance(getattr(group, field.name), torch.Tensor)
                }
                parts = {part: tensor[kept[0] : kept[-1] + 1] for part, tensor in parts.items()}
                yield dataclasses.replace(group, first=group.first + kept[0], **parts)


def shares(name, compute, lanes, *, make=ShareSource, **settings) -> list[ShareSource]:
    """Uneven ones: each has about twice the experts of the one before."""
    moe = PlainSource(name, compute).spec.moe
    count = moe.num_experts if moe else 0
    bounds = [0, *(count * (2**lane - 1) // (2**lanes - 1) for lane in range(1, lanes)), count]
    return [make(name, compute, *pair, **settings) for pair in itertools.pairwise(bounds)]


def laned(name, compute, cache, ids, lanes, **settings) -> StreamPrefill:
    sources = shares(name, compute, lanes)
    return StreamPrefill(sources[0].spec, sources, cache, ids, **settings)


@pytest.mark.parametrize("name", ORACLE_NAMES)
def test_exact_mode_is_transformers_in_float32(name):
    check_exact_mode(name, functools.partial(laned, lanes=2), prompts=(0, 1))


@pytest.mark.parametrize("name", ORACLE_NAMES)
def test_exact_mode_is_that_of_one_lane(name):
    """Behind a prefix: slots, routing, and window mass, whichever chunks the window lies in."""
    ids = (want(name)["prompt_2_ids"].tolist() * 3)[:150]
    cache = new_cache(name, "exact")
    append(cache, 0, run(native(name, "exact", cache, ids[:75]), cache))
    for window in (0, 50):
        spans = (
            streamed(name, "exact", cache, ids[75:]),
            laned(name, "exact", cache, ids[75:], 3),
        )
        for one, ours in zip(*(run(span, cache, window) for span in spans)):
            assert ours.kv_TW.dtype == one.kv_TW.dtype
            assert np.abs(ours.kv_TW - one.kv_TW).max() <= EXACT_BOUND
            assert (ours.window_mass_n is None) == (window == 0)
            if window:
                assert ours.window_mass_n.shape == one.window_mass_n.shape
                assert np.abs(ours.window_mass_n - one.window_mass_n).max() <= 1e-4
            assert (ours.router_ids_TK == one.router_ids_TK).all()
        one, ours = (span.logits(NEVER, 3) for span in spans)
        assert np.abs(ours - one).max() <= EXACT_BOUND


@pytest.mark.parametrize("lanes", [2, 3])
@pytest.mark.parametrize("name", ORACLE_NAMES)
def test_default_mode_error(name, lanes):
    check_default_mode_error(name, functools.partial(laned, lanes=lanes))


@pytest.mark.parametrize("name", ALIKE)
def test_default_mode_keeps_the_native_choice(name):
    check_choice(name, functools.partial(laned, lanes=2))


@pytest.mark.parametrize("name", ["deepseek_v3_bf16", "gpt_oss_bf16", "mistral_swa", "olmoe"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_fewer_tokens_than_chunks(name, count):
    ids = want(name)["prompt_1_ids"].tolist()[:count]
    cache = new_cache(name, "exact")
    spans = streamed(name, "exact", cache, ids), laned(name, "exact", cache, ids, 3)
    for one, ours in zip(*(run(span, cache, window=2) for span in spans)):
        assert np.abs(ours.kv_TW - one.kv_TW).max() <= EXACT_BOUND
        assert np.abs(ours.window_mass_n - one.window_mass_n).max() <= 1e-4
        assert (ours.router_ids_TK == one.router_ids_TK).all()
    assert np.abs(spans[1].hidden_TD - spans[0].hidden_TD).max() <= EXACT_BOUND


@pytest.mark.parametrize("name", ["deepseek_v3_bf16", "gpt_oss_mxfp4", "gemma3_text"])
def test_no_bit_depends_on_chunks_groups_and_threads(name):
    ids = (want(name)["prompt_2_ids"].tolist() * 3)[:270]
    results = []
    for chunk_tokens, group in ((1000, 1000), (1, 1), (128, 3), (128, 3)):
        cache = new_cache(name, "bf16")
        sources = shares(name, "bf16", 2, group=group)
        span = StreamPrefill(sources[0].spec, sources, cache, ids, chunk_tokens=chunk_tokens)
        outputs = run(span, cache, window=30)
        parts = [o.kv_TW for o in outputs] + [o.window_mass_n for o in outputs]
        parts += [o.router_ids_TK for o in outputs] + [span.hidden_TD, span.logits(NEVER, 0)]
        results.append([part.tobytes() for part in parts])
    assert all(result == results[0] for result in results[1:])


@pytest.mark.parametrize("name", ["deepseek_v3_bf16", "mistral_swa", "gpt_oss_bf16"])
def test_slots_that_were_dropped_before(name):
    """Positions with gaps before the span; windows count positions, in every chunk."""
    ids = (want(name)["prompt_2_ids"].tolist() * 2)[:170]
    cache = new_cache(name, "exact")
    outputs = run(native(name, "exact", cache, ids[:100]), cache)
    random = np.random.default_rng(1)
    for layer, output in enumerate(outputs):
        kept = np.flatnonzero(random.random(100) < 0.6)
        kept = np.union1d(kept, [99]).astype(np.int32)
        cache.native.append(layer, kept, np.ascontiguousarray(output.kv_TW[kept]))
    cache.settle()
    spans = native(name, "exact", cache, ids[100:]), laned(name, "exact", cache, ids[100:], 2)
    for theirs, ours in zip(*(run(span, cache, window=40) for span in spans)):
        assert np.abs(ours.kv_TW - theirs.kv_TW).max() <= EXACT_BOUND
        assert ours.window_mass_n.shape == theirs.window_mass_n.shape
        assert np.abs(ours.window_mass_n - theirs.window_mass_n).max() <= 1e-4
    theirs, ours = (span.logits(NEVER, 0) for span in spans)
    assert np.abs(ours - theirs).max() <= EXACT_BOUND


@pytest.mark.parametrize("layer", [1, 2])
def test_going_on_between_layers_has_the_same_bits(layer):
    name, cancel = "deepseek_v3_bf16", _native.CancelFlag()
    ids, cache = want(name)["prompt_1_ids"].tolist(), new_cache(name, "bf16")
    span = laned(name, "bf16", cache, ids, 2)
    outputs = [span.run_layer(cancel) for _ in range(layer)]
    cancel.raise_()
    assert span.run_layer(cancel) is None
    after = laned(name, "bf16", cache, ids, 2, start_layer=layer, hidden_TD=span.hidden_TD)
    outputs += [after.run_layer(NEVER) for _ in range(layer, cache.num_layers)]
    whole = laned(name, "bf16", cache, ids, 2)
    for one, other in zip(outputs, run(whole, cache)):
        assert one.kv_TW.tobytes() == other.kv_TW.tobytes()
        assert one.router_ids_TK.tobytes() == other.router_ids_TK.tobytes()
    assert after.logits(NEVER, 0).tobytes() == whole.logits(NEVER, 0).tobytes()


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("at", ["begin", "o", "router", "experts"])
def test_a_lane_that_fails_leaves_none_waiting(failing, at):
    name = "deepseek_v3_bf16"

    class Failing(ShareSource):
        number = 0

        def _look(self, what, layer):
            if (what, layer, self.number) == (at, 1, failing):
                raise OSError("the file has gone")

        def begin(self, layer):
            super().begin(layer)
            self._look("begin", layer)

        def matrix(self, role):
            words = role.split(".")
            if words[0] == "layers":
                self._look(words[-1], int(words[1]))
            return super().matrix(role)

        def expert_groups(self, layer):
            self._look("experts", layer)
            yield from super().expert_groups(layer)

    sources, cache = shares(name, "exact", 3, make=Failing), new_cache(name, "exact")
    for number, source in enumerate(sources):
        source.number = number
    span = StreamPrefill(sources[0].spec, sources, cache, want(name)["prompt_1_ids"].tolist())
    span.run_layer(NEVER)
    with pytest.raises(OSError, match="gone"):
        span.run_layer(NEVER)
    assert [source.log[-1] for source in sources] == ["release 1"] * 3
    assert run_lanes([lambda: 0] * 3, lambda: None) == [0, 0, 0]  # their threads are free again
    with pytest.raises(ValueError, match="failed"):
        span.run_layer(NEVER)


def test_nan_in_one_lane_names_the_layer():
    class Bad(ShareSource):
        def vector(self, role):
            values = super().vector(role)
            bad = role == "layers.1.ffn_norm" and self.share.start > 0
            return values * torch.nan if bad else values

    name = "deepseek_v3_bf16"
    sources, cache = shares(name, "exact", 2, make=Bad), new_cache(name, "exact")
    span = StreamPrefill(sources[0].spec, sources, cache, want(name)["prompt_1_ids"].tolist())
    with pytest.raises(NonFiniteLogits, match=r"model\.layers\.1"):
        run(span, cache)


def test_each_lane_asks_for_its_layer_once():
    name = "deepseek_v3_bf16"
    sources, cache = shares(name, "exact", 2), new_cache(name, "exact")
    span = StreamPrefill(sources[0].spec, sources, cache, want(name)["prompt_1_ids"].tolist())
    run(span, cache)
    for source in sources:
        borders = [line for line in source.log if "experts" not in line]
        assert borders == [
            f"{word} {layer}" for layer in range(cache.num_layers) for word in ("begin", "release")
        ]
