"""Streamed prefill on torch's CPU device: against transformers, the native prefill, and itself."""

from __future__ import annotations

import numpy as np
import pytest
from oracles import ORACLE_NAMES

from moechat import _native
from moechat.errors import NonFiniteLogits
from moechat.kv.cache import KVCache
from moechat.prefill.cpu import CpuPrefill

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")
from plain_source import PlainSource  # noqa: E402
from prefill_contract import (  # noqa: E402
    EXACT_BOUND,
    NEVER,
    append,
    check_choice,
    check_default_mode_error,
    check_exact_mode,
    loaded,
    native,
    new_cache,
    rms_bound,
    run,
    want,
)

from moechat.prefill.gpu.prefix import read_prefix  # noqa: E402
from moechat.prefill.gpu.stream_prefill import StreamPrefill  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def streamed(name, compute, cache, ids, *, group=3, **settings) -> StreamPrefill:
    source = PlainSource(name, compute, group=group)
    return StreamPrefill(source.spec, source, cache, ids, **settings)


def values(slots: np.ndarray) -> np.ndarray:
    if slots.dtype == np.uint16:
        return (slots.astype(np.uint32) << 16).view(np.float32)
    return slots


@pytest.mark.parametrize("name", ORACLE_NAMES)
def test_exact_mode_is_transformers_in_float32(name):
    check_exact_mode(name, streamed)


@pytest.mark.parametrize("name", ORACLE_NAMES)
@pytest.mark.parametrize("prefix", [0, 75])
def test_exact_mode_is_the_native_prefill(name, prefix):
    """Logits, slots, window mass and routing, also behind tokens that the cache holds."""
    cache, spans = both(name, "exact", prefix)
    for theirs, ours in zip(*(run(span, cache, window=20) for span in spans)):
        for array, other in zip(vars(ours).values(), vars(theirs).values()):
            assert array.shape == other.shape and array.dtype == other.dtype
        assert np.abs(ours.kv_TW - theirs.kv_TW).max() <= EXACT_BOUND
        assert np.abs(ours.window_mass_n - theirs.window_mass_n).max() <= 1e-4
        assert (ours.router_ids_TK == theirs.router_ids_TK).all()
    theirs, ours = (span.logits(NEVER, 3) for span in spans)
    assert ours.shape == theirs.shape and ours.dtype == np.float32
    assert np.abs(ours - theirs).max() <= EXACT_BOUND


# Of FP8 the native kernels scale sums, the plain source rounds scaled weights to BF16: which of the
# two a source does is its own affair, and moves more than what is compared here.
ALIKE = [name for name in ORACLE_NAMES if "fp8" not in name]


@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("prefix", [0, 75])
def test_default_mode_is_the_native_prefill(name, prefix):
    """Slots of the first layer within a step of BF16; logits within twice transformers' BF16 error.

    Later a sum that is rounded the other way on its way to a product or a slot moves what follows.
    """
    cache, spans = both(name, "bf16", prefix)
    layers = [run(span, cache, window=20) for span in spans]
    for theirs, ours in zip(*layers):
        for array, other in zip(vars(ours).values(), vars(theirs).values()):
            assert array.shape == other.shape and array.dtype == other.dtype
        assert np.abs(ours.window_mass_n - theirs.window_mass_n).max() <= 0.2
    theirs, ours = (values(outputs[0].kv_TW) for outputs in layers)
    step = np.maximum(np.abs(theirs), 2.0**-6) * 2.0**-7
    assert (np.abs(ours - theirs) <= step).all()
    assert (ours == theirs).mean() > 0.99
    theirs, ours = (span.logits(NEVER, 3) for span in spans)
    rms = float(np.sqrt(np.mean((ours - theirs) ** 2)))
    print(f"{name}: logits rms difference {rms:.4f}, bound {rms_bound(name):.4f}")
    assert rms <= rms_bound(name)


def both(name: str, compute: str, prefix: int) -> tuple[KVCache, list[CpuPrefill | StreamPrefill]]:
    """Native and streamed spans of the same tokens, behind ``prefix`` that the cache holds."""
    prompts = [want(name)[f"prompt_{p}_ids"].tolist() for p in (2, 1)]
    ids = (prompts[0] + prompts[1] + prompts[0])[:150]
    cache = new_cache(name, compute)
    if prefix:
        append(cache, 0, run(native(name, compute, cache, ids[:prefix]), cache))
    return cache, [make(name, compute, cache, ids[prefix:]) for make in (native, streamed)]


def test_a_prefix_crosses_to_the_device_as_it_is_cached():
    """Of 128K tokens twice the bytes would take as long as a layer's weights."""
    name = "deepseek_v3_bf16"
    ids = want(name)["prompt_1_ids"].tolist()
    for compute, dtype in (("bf16", torch.bfloat16), ("exact", torch.float32)):
        cache = new_cache(name, compute)
        append(cache, 0, run(native(name, compute, cache, ids), cache))
        prefix = read_prefix(cache, 0, len(ids), len(ids), 1)
        assert prefix.slots_PW.dtype == dtype and len(prefix.slots_PW) == len(ids)


@pytest.mark.parametrize("name", ORACLE_NAMES)
def test_default_mode_error(name):
    check_default_mode_error(name, streamed)


@pytest.mark.parametrize("name", ALIKE)
def test_default_mode_keeps_the_native_choice(name):
    check_choice(name, streamed)


@pytest.mark.parametrize("name", ["deepseek_v3_bf16", "gpt_oss_mxfp4", "gemma3_text", "qwen2_moe"])
@pytest.mark.parametrize("compute", ["exact", "bf16"])
def test_no_bit_depends_on_chunks_and_groups(name, compute):
    ids = (want(name)["prompt_2_ids"].tolist() * 3)[:270]
    results = []
    for chunk_tokens, group in ((1000, 1000), (1, 1), (128, 3), (65, 5)):
        cache = new_cache(name, compute)
        span = streamed(name, compute, cache, ids, chunk_tokens=chunk_tokens, group=group)
        outputs = run(span, cache, window=30)
        parts = [o.kv_TW for o in outputs] + [o.window_mass_n for o in outputs]
        parts += [o.router_ids_TK for o in outputs] + [span.hidden_TD, span.logits(NEVER, 0)]
        results.append([part.tobytes() for part in parts])
    assert all(result == results[0] for result in results[1:])


@pytest.mark.parametrize("name", ["deepseek_v3_bf16", "mistral_swa", "gemma3_text", "gpt_oss_bf16"])
def test_slots_that_were_dropped_before(name):
    """Layers hold different numbers of slots, and positions have gaps; windows count positions."""
    ids = (want(name)["prompt_2_ids"].tolist() * 2)[:170]
    cache, spec = new_cache(name, "exact"), loaded(name, "exact").spec
    outputs = run(native(name, "exact", cache, ids[:140]), cache)
    random = np.random.default_rng(1)
    for layer, output in enumerate(outputs):
        kept = np.flatnonzero(random.random(140) < 0.6)
        kept = np.union1d(kept, [139]).astype(np.int32)
        cache.native.append(layer, kept, np.ascontiguousarray(output.kv_TW[kept]))
    cache.settle()
    spans = [make(name, "exact", cache, ids[140:]) for make in (native, streamed)]
    for theirs, ours in zip(*(run(span, cache, window=40) for span in spans)):
        assert np.abs(ours.kv_TW - theirs.kv_TW).max() <= EXACT_BOUND
        assert ours.window_mass_n.shape == theirs.window_mass_n.shape
        assert np.abs(ours.window_mass_n - theirs.window_mass_n).max() <= 1e-4
    theirs, ours = (span.logits(NEVER, 0) for span in spans)
    assert spec.num_layers > 1 and np.abs(ours - theirs).max() <= EXACT_BOUND


class CutSource(PlainSource):
    """Raises ``cancel`` when ``at`` appears in the log."""

    def __init__(self, name: str, at: str, cancel: _native.CancelFlag) -> None:
        super().__init__(name, "exact")
        self.at, self.cancel = at, cancel

    def begin(self, layer):
        super().begin(layer)
        self._look()

    def expert_groups(self, layer):
        for group in super().expert_groups(layer):
            self._look()
            yield group

    def _look(self):
        if self.log[-1] == self.at:
            self.cancel.raise_()


@pytest.mark.parametrize("at", ["begin 0", "begin 1", "experts 1 3"])
def test_cancel_is_heard_between_layers(at):
    """The layer that runs is complete; what is left runs later, with the same bits."""
    cancel, name = _native.CancelFlag(), "deepseek_v3_bf16"
    source, cache = CutSource(name, at, cancel), new_cache(name, "exact")
    ids = want(name)["prompt_1_ids"].tolist()
    span = StreamPrefill(source.spec, source, cache, ids)
    outputs = []
    while not outputs or outputs[-1] is not None:
        outputs.append(span.run_layer(cancel))
    layer = int(at.split()[1])
    assert span.next_layer == layer + 1 == len(outputs) - 1
    assert source.log[-1] == f"release {layer}"
    if span.next_layer < cache.num_layers:
        with pytest.raises(ValueError, match="last layer"):
            span.logits(NEVER, 0)
    after = streamed(
        name, "exact", cache, ids, start_layer=span.next_layer, hidden_TD=span.hidden_TD
    )
    for one in (span, after):
        outputs[layer + 1 :] = [
            one.run_layer(NEVER) for _ in range(one.next_layer, cache.num_layers)
        ]
        assert same(outputs, one, *uncut(name, ids))


def uncut(name, ids):
    whole = streamed(name, "exact", new_cache(name, "exact"), ids)
    return run(whole, new_cache(name, "exact")), whole


def same(outputs, span, expected_outputs, expected_span) -> bool:
    """Bit for bit."""
    parts = [
        [o.kv_TW.tobytes() for o in some] + [o.router_ids_TK.tobytes() for o in some]
        for some in (outputs, expected_outputs)
    ]
    logits = [one.logits(NEVER, 0).tobytes() for one in (span, expected_span)]
    return parts[0] == parts[1] and logits[0] == logits[1]


@pytest.mark.parametrize(
    "settings",
    [
        {"start_layer": 1},
        {"hidden_TD": np.zeros((3, 64), np.float32)},
        {"start_layer": 1, "hidden_TD": np.zeros((2, 64), np.float32)},
        {"start_layer": 99, "hidden_TD": np.zeros((3, 64), np.float32)},
    ],
)
def test_starts_that_make_no_sense(settings):
    with pytest.raises(ValueError, match=r"start between layers|hidden states"):
        streamed("llama", "exact", new_cache("llama", "exact"), [5, 6, 7], **settings)


def test_cancelled_logits():
    cancel, name = _native.CancelFlag(), "llama"
    cache = new_cache(name, "exact")
    span = streamed(name, "exact", cache, [5, 6, 7])
    run(span, cache)
    cancel.raise_()
    assert span.logits(cancel, 0) is None
    assert span.logits(NEVER, 2).shape == (1, loaded(name, "exact").spec.vocab_size)


def test_nan_names_the_first_bad_layer():
    class BadSource(PlainSource):
        def vector(self, role):
            values = super().vector(role)
            return values * torch.nan if role == "layers.1.ffn_norm" else values

    source = BadSource("llama", "exact")
    span = StreamPrefill(source.spec, source, new_cache("llama", "exact"), [5, 6, 7])
    span.run_layer(NEVER)
    span.run_layer(NEVER)  # it is seen when the next layer is under way
    with pytest.raises(NonFiniteLogits, match=r"model\.layers\.1"):
        span.run_layer(NEVER)
    assert source.log[-1] == "release 2"
    with pytest.raises(ValueError, match="failed"):
        span.run_layer(NEVER)


def test_nan_of_the_last_layer():
    last = loaded("llama", "exact").spec.num_layers - 1

    class BadSource(PlainSource):
        def vector(self, role):
            values = super().vector(role)
            return values * torch.nan if role == f"layers.{last}.ffn_norm" else values

    source, cache = BadSource("llama", "exact"), new_cache("llama", "exact")
    span = StreamPrefill(source.spec, source, cache, [5, 6, 7])
    with pytest.raises(NonFiniteLogits, match=rf"model\.layers\.{last}"):
        run(span, cache)
    assert span.next_layer == last


@pytest.mark.parametrize("ids", [[], [-1], [10**6]])
def test_ids_that_the_model_does_not_have(ids):
    with pytest.raises(ValueError, match="ids of the vocabulary"):
        streamed("llama", "exact", new_cache("llama", "exact"), ids)


def test_cache_of_another_mode():
    with pytest.raises(ValueError, match="mode bf16"):
        streamed("llama", "exact", new_cache("llama", "bf16"), [1])
