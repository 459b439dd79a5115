"""Experts that decode's GPU holds, exchanged for those that a prompt used."""

from __future__ import annotations

import functools
import queue
import threading

import numpy as np
import pytest
from oracle_variants import VARIANTS, variant
from oracles import MINI, oracle_folder

from moechat import SamplingParams, _native
from moechat.decode.worker import Call
from moechat.prefill.cpu import CpuPrefill

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")
from stored_models import native_weights  # noqa: E402

from moechat.decode.gpu import expert_slots, host_pieces, hot_experts, hybrid_loop  # noqa: E402
from moechat.decode.gpu.hot_experts import HotExperts, most_used  # noqa: E402
from moechat.decode.gpu.weight_views import dense  # noqa: E402
from moechat.gpu_weights.stored import StoredWeights  # noqa: E402
from moechat.prefill.gpu.gpu_prefill import GpuSpan  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_torch_thread")

# FP8 of whole and of ragged blocks, FP8 of channels, BF16, INT4, F32; experts in one tensor and in
# many.
MODELS = (
    "deepseek_v3_fp8_256", "deepseek_v3_fp8_odd", "glm4_moe-fp8-channel", "deepseek_v3_bf16",
    "olmoe", "deepseek_v3-int4", "qwen3_moe-f32",
)  # fmt: skip


CODES = ("deepseek_v3_fp8_256", "deepseek_v3_fp8_odd")  # in default mode
ROUNDED = ("glm4_moe-fp8-channel", "deepseek_v3-int4")  # once more, by the same


@functools.cache
def folder_of(name):
    if name == "mini":
        return MINI
    return variant(name).folder if name in VARIANTS else oracle_folder(name)


def prompt(engine, seed, length=40):
    return np.random.default_rng(seed).integers(10, engine.spec.vocab_size, length).tolist()


def greedy(session, ids, max_tokens=24):
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_end=True)
    events = list(session.generate(ids, params))
    return [event.token_id for event in events if event.token_id is not None], events[-1].stats


@pytest.fixture
def open_hot(open_engine, monkeypatch):
    def open_(name="mini", number=2, **settings):
        usual = {"device": "torch-cpu", "gpu_prefill_tokens": 0, "gpu_decode": "on"}
        return open_engine(folder_of(name), gpu_experts=number, **usual | settings)

    return open_


def held(engine):
    """By layer, as the step sees it."""
    layers = engine.decode.device.hot.layers.items()
    return {layer: set((own.place_E >= 0).nonzero()[:, 0].tolist()) for layer, own in layers}


def settle(engine):
    """Come to the end of the exchange, on the decode thread."""
    done = queue.SimpleQueue()
    advance = engine.decode.device.hot.advance
    engine.decode.channel.send(Call(advance, lambda _result, error: done.put(error)))
    assert done.get(timeout=20) is None
    assert not engine.decode.device.hot.exchanging


def routing(engine, ids):
    """How often the CPU's prefill sends the tokens to each expert, by MoE layer."""
    span = CpuPrefill(engine.model.native, _native.ThreadPool(1), engine.session().cache, ids)
    never, uses = _native.CancelFlag(), {}
    for number, layer in enumerate(engine.spec.layers):
        chosen = span.run_layer(never).router_ids_TK
        if layer.moe:
            uses[number] = np.bincount(chosen.ravel(), minlength=engine.spec.moe.num_experts)
    return uses


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("compute", ["exact", "bf16"])
def test_slots_hold_the_weights_of_the_cpu(name, compute, open_engine, monkeypatch):
    """Whatever was there before, in pieces of any size."""
    engine = open_engine(folder_of(name), compute=compute, device="torch-cpu")
    monkeypatch.setattr(host_pieces, "PIECE_BYTES", 1000)
    told = {}
    hot = HotExperts(
        engine.spec,
        StoredWeights.of(engine.model.tensors),
        2,
        device=torch.device("cpu"),
        compute=compute,
        changed=lambda layer, ids: told.update({layer: list(ids)}),
    )
    addresses = [_parts(layer.gate)[0].data_ptr() for layer in hot.layers.values()]
    layer = max(hot.layers)
    for chosen in ([0, 3], [3, 5], [1, 2]):
        uses_E = np.zeros(engine.spec.moe.num_experts, np.int64)
        uses_E[chosen] = 1
        hot.want({layer: uses_E})
        hot.advance()
        assert sorted(told[layer]) == chosen and set(told) == {layer}
        place_E, native = hot.layers[layer].place_E, native_weights(folder_of(name))
        for expert in chosen:
            for part in ("gate", "up", "down"):
                stack = getattr(hot.layers[layer], part)
                ours = dense(stack[int(place_E[expert])]).numpy()
                theirs = native[f"layers.{layer}.experts.{expert}.{part}"]
                if compute == "bf16" and name in ROUNDED:
                    assert np.abs(ours - theirs).max() <= np.abs(theirs).max() / 256
                else:
                    assert (ours == theirs).all()
    assert addresses == [_parts(each.gate)[0].data_ptr() for each in hot.layers.values()]
    codes = [not isinstance(each.gate, torch.Tensor) for each in hot.layers.values()]
    assert all(codes) == any(codes) == (name in CODES and compute == "bf16")


def _parts(weight):
    return (weight,) if isinstance(weight, torch.Tensor) else (weight.codes, weight.scale)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("share", ["none", "one", "all"])
def test_tokens_are_the_cpus_and_experts_those_of_the_prompt(name, share, open_engine, open_hot):
    plain = open_engine(folder_of(name), compute="exact")
    number = {"none": 0, "one": 1, "all": plain.spec.moe.num_experts}[share]
    engine = open_hot(name, number, compute="exact")
    for seed in range(2):
        ids = prompt(engine, seed)
        want = greedy(plain.session(), ids)[0]
        assert greedy(engine.session(), ids)[0] == want
        if not number:
            assert engine.decode.device.hot is None
            continue
        settle(engine)
        tokens, stats = greedy(engine.session(), ids)
        assert tokens == want and stats.gpu_experts == number
        for layer, uses_E in routing(plain, ids[:-1]).items():  # there are ties
            most = uses_E[most_used(uses_E, number)].sum()
            assert uses_E[list(held(engine)[layer])].sum() == most > 0


@pytest.mark.parametrize("name", ["deepseek_v3_fp8_256", "deepseek_v3_bf16", "deepseek_v3-int4"])
def test_default_mode_gives_the_same_tokens(name, open_hot):
    """As without held experts, up to a choice that is not clear."""
    plain, compared = open_hot(name, 0), 0
    engine = open_hot(name, plain.spec.moe.num_experts // 2)
    for seed in range(3):
        ids = prompt(plain, seed)
        greedy(engine.session(), ids, 1)
        settle(engine)
        ours, theirs = (greedy(each.session(), ids)[0] for each in (engine, plain))
        same = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), len(ours))
        compared += same
        if same < len(ours):
            logits = np.sort(plain.session().extend(ids + theirs[:same], logits="last")[0])
            assert logits[-1] - logits[-2] < 0.25
    assert compared > 48


@pytest.fixture
def copies(monkeypatch):
    """Each piece of an expert that was copied, as (thread, bytes)."""
    seen = []

    class Counted(host_pieces.HostPieces):
        def copy(self, target, source):
            for _ in super().copy(target, source):
                seen.append((threading.current_thread().name, min(len(source), 4096)))
                yield

    monkeypatch.setattr(host_pieces, "PIECE_BYTES", 4096)
    monkeypatch.setattr(hot_experts, "HostPieces", Counted)
    return seen


def test_copies_are_made_between_steps_in_small_parts(open_hot, copies, monkeypatch):
    """Never before the first token, then a piece before each step. A part of an expert is none."""
    name, ids = "deepseek_v3_bf16", list(range(10, 50))
    want = greedy(open_hot(name, 0).session(), ids, 40)[0]
    monkeypatch.setattr(hybrid_loop, "_EXCHANGE_SHARE", 1e-9)
    monkeypatch.setattr(host_pieces, "PIECE_BYTES", 1000)  # of 7680, the bytes of a matrix
    engine = open_hot(name, 3)
    device, begun = engine.decode.device, []
    lane = device.lanes[0]
    monkeypatch.setattr(
        lane, "begin", lambda rows, real=lane.begin: (begun.append(len(copies)), real(rows))
    )
    assert greedy(engine.session(), ids, 40)[0] == want
    assert begun == [i - i // 25 for i in range(40)]  # one more stop where an expert is complete
    assert {thread for thread, _ in copies} == {"decode"}
    assert device.num_held_experts == 0 and sum(map(len, held(engine).values())) == 1
    assert device.hot.exchanging


def test_only_what_is_not_there_is_copied(open_hot, copies):
    engine = open_hot("deepseek_v3_bf16", 4)
    first, other = prompt(engine, 1), prompt(engine, 2)
    greedy(engine.session(), first)
    settle(engine)
    before, pieces_each = held(engine), len(copies) / (4 * len(held(engine)))
    copies.clear()
    greedy(engine.session(), first)
    assert copies == [] and held(engine) == before
    greedy(engine.session(), other)
    settle(engine)
    came = sum(len(experts - before[layer]) for layer, experts in held(engine).items())
    assert 0 < came < 4 * len(before) and len(copies) == came * pieces_each


@pytest.mark.parametrize("what", ["short", "by the CPU", "cancelled", "extended"])
def test_which_prompts_decide(what, open_hot, monkeypatch):
    engine = open_hot("deepseek_v3_bf16", 4)
    greedy(engine.session(), prompt(engine, 1))
    settle(engine)
    before, other = held(engine), prompt(engine, 2)
    if what == "by the CPU":
        engine.prefill_choice._given = 1000
    if what == "extended":
        engine.session().extend(other, logits=None)
    elif what == "cancelled":
        real, session, ran = GpuSpan.run_layer, engine.session(), []

        def cancelled_after_two(span, cancel, window=0):
            if len(ran) == 2:
                session.cancel()
            ran.append(span)
            return real(span, cancel, window)

        monkeypatch.setattr(GpuSpan, "run_layer", cancelled_after_two)
        assert greedy(session, other)[0] == []
    else:
        greedy(engine.session(), other[:32] if what == "short" else other)
    assert engine.decode.device.hot.exchanging == (what == "extended")
    settle(engine)
    assert (held(engine) != before) == (what == "extended")


def test_prompts_in_parts_count_as_one(open_engine, open_hot):
    engine = open_hot(number=4, compute="exact")
    engine.prefill_choice.gpu.max_tokens = 30
    ids = prompt(engine, 1, 101)
    greedy(engine.session(), ids)
    settle(engine)
    wanted = routing(open_engine(MINI, compute="exact"), ids[:-1])
    assert held(engine) == {n: set(most_used(uses_E, 4)) for n, uses_E in wanted.items()}


def test_several_sessions(open_engine, open_hot):
    """Some answers are under way when the experts change, in one lane and in two."""
    name = "deepseek_v3_bf16"
    plain = open_engine(folder_of(name), compute="exact")
    engine = open_hot(name, 5, compute="exact")
    prompts = [prompt(engine, seed) for seed in range(4)]
    want = [greedy(plain.session(), ids, 48)[0] for ids in prompts]
    for _ in range(2):
        got = [None] * 4

        def run(number, got=got):
            got[number] = greedy(engine.session(), prompts[number], 48)[0]

        threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert got == want
    settle(engine)
    assert any(
        all(
            uses_E[list(held(engine)[layer])].sum() == uses_E[most_used(uses_E, 5)].sum()
            for layer, uses_E in routing(plain, ids[:-1]).items()
        )
        for ids in prompts
    )


def test_an_answer_that_is_cancelled_amidst_the_exchange(open_engine, open_hot, copies):
    name, settings = "deepseek_v3_bf16", {"compute": "exact"}
    engine, plain = open_hot(name, 8, **settings), open_engine(folder_of(name), **settings)
    for seed in range(3):
        ids, session = prompt(engine, seed), engine.session()
        for event in session.generate(ids, SamplingParams(temperature=0, max_tokens=400)):
            if event.token_id is not None and len(session) > len(ids) + 3:
                session.cancel()
        assert event.finish_reason == "cancelled"
        session.rewind(0)
        assert greedy(session, ids)[0] == greedy(plain.session(), ids)[0]
    settle(engine)
    assert engine.decode.device.num_held_experts == 8


def test_too_little_memory_for_decoding_ends_the_exchange(open_engine, open_hot, monkeypatch):
    def no_room(*arguments):
        raise torch.OutOfMemoryError("no room")

    name = "deepseek_v3-int4"
    engine = open_hot(name, 2, compute="exact")
    plain, ids = open_engine(folder_of(name), compute="exact"), prompt(engine, 1)
    with monkeypatch.context() as patch:
        patch.setattr(expert_slots, "decode", no_room)
        assert greedy(engine.session(), ids)[0] == greedy(plain.session(), ids)[0]
    assert not engine.decode.device.hot.exchanging and engine.decode.device.num_held_experts == 0
    greedy(engine.session(), ids)
    settle(engine)
    assert engine.decode.device.num_held_experts == 2
