"""An engine whose prompts are read by streamed prefill, on torch's CPU device."""

from __future__ import annotations

import re

import numpy as np
import pytest
from oracles import MINI, expected

from moechat.errors import BadParameter, DoesNotFit
from moechat.events import PrefillProgress
from moechat.kv.cache import KVCache

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")

from draft_models import agreeing_folder  # noqa: E402
from streamed_engine import PROMPT, answer  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.mark.parametrize("compute", ["bf16", "exact"])
def test_greedy_tokens_are_those_of_the_cpu(compute, open_engine, open_streamed):
    want, _ = answer(open_engine(MINI, compute=compute).session(), PROMPT)
    session = open_streamed(MINI, compute=compute).session()
    got, events = answer(session, PROMPT)
    assert got == want
    stats = events[-1].stats
    assert stats.prefill_device == "torch-cpu"
    assert stats.prefill_streamed_bytes > 10_000_000  # the experts of mini
    assert 0 < stats.prefill_compute_seconds < stats.prefill_seconds
    assert stats.prefill_stream_seconds > 0 and stats.prefill_wait_seconds >= 0
    progress = [event for event in events if isinstance(event, PrefillProgress)]
    assert [event.layers_done for event in progress] == list(range(1, 7))
    assert all(event.stream_bytes_per_second > 0 for event in progress)


@pytest.mark.parametrize("count", [2, 3])
def test_several_devices_share_the_experts(count, open_engine, open_streamed):
    want, _ = answer(open_engine(MINI, compute="exact").session(), PROMPT)
    engine = open_streamed(MINI, compute="exact", device=f"torch-cpu:{count}")
    got, events = answer(engine.session(), PROMPT)
    assert got == want
    assert events[-1].stats.prefill_device == "+".join(["torch-cpu"] * count)
    alone = open_streamed(MINI, compute="exact")
    _, events_alone = answer(alone.session(), PROMPT)
    streamed, streamed_alone = (e[-1].stats.prefill_streamed_bytes for e in (events, events_alone))
    experts = alone.prefill_choice.gpu.pass_bytes
    # Each device has all that is no routed expert.
    assert streamed - experts == count * (streamed_alone - experts) > 0


def test_prompts_share_the_ways_between_devices(open_streamed):
    gpu = open_streamed(MINI, device="torch-cpu:2").prefill_choice.gpu
    cache = KVCache(0, gpu._spec, "bf16")
    routes = [gpu.span(cache, [5])._stream._exchange._routes for _ in range(2)]
    assert routes[0] is routes[1] and len(routes[0]) == 2


def test_any_threshold_gives_the_same_tokens(small_oracle, open_engine, open_streamed):
    """Of prompts about it: the device differs, the answer does not."""
    reference = open_engine(small_oracle, compute="exact")
    ids = expected(small_oracle)["prompt_2_ids"].tolist() * 2
    prompts = [ids[:n] for n in (2, 30, 31, 60)]
    want = [answer(reference.session(), prompt)[0] for prompt in prompts]
    for threshold in (0, 29, 30, 10_000, None):
        engine = open_streamed(small_oracle, compute="exact", gpu_prefill_tokens=threshold)
        devices = []
        for prompt, tokens in zip(prompts, want):
            got, events = answer(engine.session(), prompt)
            assert got == tokens
            devices.append(events[-1].stats.prefill_device)
        if threshold is not None:  # the last token is decode's
            wanted = ["torch-cpu" if len(p) - 1 >= threshold else "cpu" for p in prompts]
            assert devices == wanted


def test_logits_are_those_of_the_cpu(small_oracle, open_engine, open_streamed):
    ids = expected(small_oracle)["prompt_1_ids"].tolist()
    engines = (
        open_engine(small_oracle, compute="exact"),
        open_streamed(small_oracle, compute="exact"),
    )
    for part, logits in ((ids[:9], "all"), (ids[9:], "all"), ([3, 4, 5], "last"), ([7], None)):
        pair = [engine.session().extend(part, logits=logits) for engine in engines]
        assert logits is None or np.abs(pair[0] - pair[1]).max() <= 1e-3


def test_long_prompts_are_read_in_parts(open_engine, open_streamed):
    """Each after the cache has the one before; logits of the whole are there in the end."""
    reference, engine = open_engine(MINI, compute="exact"), open_streamed(MINI, compute="exact")
    engine.prefill_choice.gpu.max_tokens = 20
    want, got = (e.session().extend(PROMPT, logits="all") for e in (reference, engine))
    assert got.shape == want.shape and np.abs(got - want).max() <= 1e-3
    tokens, events = answer(engine.session(), PROMPT)
    assert tokens == answer(reference.session(), PROMPT)[0]
    progress = [event for event in events if isinstance(event, PrefillProgress)]
    assert [event.layers_done for event in progress] == list(range(1, 4 * 6 + 1))
    assert {event.num_layers for event in progress} == {24}


def test_little_memory_streams_all_the_same(open_engine, open_streamed):
    want, _ = answer(open_engine(MINI).session(), PROMPT)
    engine = open_streamed(MINI, gpu_memory_bytes=48_000_000)
    assert engine.prefill_choice.gpu.max_tokens < engine.context_tokens
    assert answer(engine.session(), PROMPT)[0] == want
    with pytest.raises(DoesNotFit, match="streamed through this GPU"):
        open_streamed(MINI, gpu_memory_bytes=1_000_000)


@pytest.mark.parametrize("memory_bytes", [None, 200_000_000])
def test_inputs_of_eight_bits_are_opted_for(memory_bytes, open_engine, open_streamed):
    """Less exact than BF16 inputs, of a model in FP8; the cache is the same."""
    exact = open_engine(MINI, compute="exact").session().extend(PROMPT, logits="all")
    errors = []
    for compute in ("bf16", "w8a8"):
        engine = open_streamed(MINI, compute=compute, gpu_memory_bytes=memory_bytes)
        assert engine.compute == "bf16"
        logits = engine.session().extend(PROMPT, logits="all")
        errors.append(np.sqrt(np.mean((logits - exact) ** 2)))
    assert 2 * errors[0] < errors[1] < exact.std() / 2
    with pytest.raises(BadParameter, match=r"compute cannot be 'w8a8'.*--device cuda"):
        open_engine(MINI, compute="w8a8")


def test_speculation_stays_exact(open_engine, open_streamed):
    """The draft layer is not streamed: it has no KV of the prompt, which costs hits alone."""
    folder = agreeing_folder()
    ids = [5 + i % 300 for i in range(60)]
    want, _ = answer(open_engine(folder, compute="exact").session(), ids)
    engine = open_streamed(folder, compute="exact", speculate=True)
    got, events = answer(engine.session(), ids)
    assert got == want and events[-1].stats.prefill_device == "torch-cpu"
    assert events[-1].stats.drafted > 0
    plain = open_streamed(folder)
    assert engine.prefill_choice.gpu.pass_bytes == plain.prefill_choice.gpu.pass_bytes


@pytest.mark.parametrize("policy", ["int8", "snapkv"])
def test_every_kv_policy_works_in_parts(policy, open_streamed):
    engine = open_streamed(MINI, kv=policy, kv_budget=0.5 if policy == "snapkv" else None)
    engine.prefill_choice.gpu.max_tokens = 40
    session = engine.session()
    _, events = answer(session, PROMPT)
    stats = events[-1].stats
    assert 0 < stats.kv_bytes < stats.kv_native_bytes
    assert (stats.kv_dropped_fraction > 0.3) == (policy == "snapkv")
    assert len(session.cache) == len(session) - 1


@pytest.mark.parametrize("memory_bytes", [None, 200_000_000])
def test_decode_may_step_there_too(memory_bytes, open_engine, open_streamed):
    loop = pytest.importorskip("moechat.decode.gpu.hybrid_loop")
    want, _ = answer(open_engine(MINI, compute="exact").session(), PROMPT)
    settings = {"compute": "exact", "gpu_memory_bytes": memory_bytes}
    engine = open_streamed(MINI, gpu_decode="on", **settings)
    assert isinstance(engine.decode.device, loop.HybridDecode)
    got, events = answer(engine.session(), PROMPT)
    assert got == want and events[-1].stats.decode_device == "torch-cpu"
    assert open_streamed(MINI, **settings).decode.device is None
    # On torch's CPU device only where it is asked for, however much memory there is.
    assert open_streamed(MINI, gpu_decode="auto", **settings).decode.device is None


@pytest.mark.parametrize("decode", ["off", "on"])
@pytest.mark.parametrize("compute", ["bf16", "exact"])
def test_memory_that_is_said_to_be_enough_is_enough(decode, compute, open_streamed):
    settings = {"gpu_decode": decode, "compute": compute}
    with pytest.raises(DoesNotFit) as caught:
        open_streamed(MINI, gpu_memory_bytes=1_000_000, **settings)
    enough = int(re.search(r"--gpu-memory (\d+)MB is enough", caught.value.next_step)[1])
    engine = open_streamed(MINI, gpu_memory_bytes=enough * 10**6, **settings)
    assert len(answer(engine.session(), PROMPT)[0]) == 8
    with pytest.raises(DoesNotFit):
        open_streamed(MINI, gpu_memory_bytes=(enough - 2) * 10**6, **settings)
