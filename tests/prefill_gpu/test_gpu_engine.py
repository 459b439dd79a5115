"""An engine whose prompts are read by streamed prefill, on torch's CPU device."""

from __future__ import annotations

import gc
import re
import threading
import time
import weakref

import numpy as np
import pytest
from oracles import MINI, expected

from moechat import SamplingParams
from moechat.engine.conversation import Conversation
from moechat.errors import DeviceUnavailable, DoesNotFit
from moechat.events import PrefillProgress
from moechat.prefill.cpu import CpuPrefill
from moechat.prefill.suspended import Shelf
from moechat.terminal.stats_text import stats_rows

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")

from draft_models import agreeing_folder  # noqa: E402

from moechat.prefill.gpu.gpu_prefill import GpuSpan  # noqa: E402
from moechat.prefill.gpu.stream_prefill import StreamPrefill  # noqa: E402

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_end=True)
PROMPT = [0, 3, 1204, 5, 4, *range(100, 170)]


pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture
def open_streamed(open_engine):
    def open_(path, **settings):
        return open_engine(path, **{"device": "torch-cpu", "gpu_prefill_tokens": 0} | settings)

    return open_


def answer(session, ids, params=GREEDY):
    events = list(session.generate(ids, params))
    return [event.token_id for event in events if event.token_id is not None], events


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


@pytest.mark.parametrize("part", [1, 2])
def test_a_prompt_in_parts_can_be_cancelled(part, small_oracle, open_engine, open_streamed):
    engine = open_streamed(small_oracle, compute="exact")
    engine.prefill_choice.gpu.max_tokens = 20
    session = engine.session()
    ids = expected(small_oracle)["prompt_2_ids"].tolist() * 2
    handle = session.generate(ids, GREEDY)
    for event in handle:
        if isinstance(event, PrefillProgress) and event.layers_done == 2 * part:
            handle.cancel()
    assert event.finish_reason == "cancelled" and len(session.cache) == 0
    session.rewind(0)
    want = answer(open_engine(small_oracle, compute="exact").session(), ids)[0]
    assert answer(session, ids)[0] == want


def cancelled_after(session, ids, layers):
    """Cut a prefill when so many layers have run; returns how many had."""
    handle, seen = session.generate(ids, GREEDY), 0
    before = len(session) - len(ids)
    for event in handle:
        if isinstance(event, PrefillProgress):
            seen = event.layers_done
            if seen >= layers:
                handle.cancel()
    assert event.finish_reason == "cancelled"
    assert len(session.cache) <= before
    session.rewind(before)
    return seen


def slots_of(session):
    cache, count = session.cache, len(session.cache)
    return [cache.read(layer, 0, count) for layer in range(cache.num_layers)]


def stop_after(patch, layers, kind=GpuSpan):
    """Let so many layers of prefills pass, and hold the next until it is cancelled."""
    run_layer, passed = kind.run_layer, []

    def held(span, cancel, window=0):
        while len(passed) >= layers and not cancel.raised:
            time.sleep(0.001)
        passed.append(span)
        return run_layer(span, cancel, window)

    patch.setattr(kind, "run_layer", held)


@pytest.mark.parametrize("prefix", [0, 40])
@pytest.mark.parametrize("layers", [1, 3, 5])
def test_a_cancelled_prompt_goes_on_where_it_was_cut(layers, prefix, open_streamed, monkeypatch):
    engine = open_streamed(MINI)
    whole, session = engine.session(), engine.session()
    for each in (whole, session):
        if prefix:
            each.extend(PROMPT[:prefix], logits=None)
    want, _ = answer(whole, PROMPT[prefix:])
    with monkeypatch.context() as patch:
        stop_after(patch, layers)
        assert cancelled_after(session, PROMPT[prefix:], layers) == layers
    got, events = answer(session, PROMPT[prefix:])
    assert got == want
    assert events[-1].stats.prefill_resumed_layers == layers
    for ours, theirs in zip(slots_of(session), slots_of(whole), strict=True):
        assert (ours == theirs).all()


@pytest.mark.parametrize("device", ["cpu", "torch-cpu"])
def test_a_cut_prompt_says_how_far_it_came(device, open_streamed, monkeypatch):
    kind = CpuPrefill if device == "cpu" else GpuSpan
    session = open_streamed(MINI, device=device).session()
    with monkeypatch.context() as patch:
        stop_after(patch, 2, kind)
        cancelled_after(session, PROMPT, 2)
    stats = session.last_stats
    assert (stats.prefill_layers_done, stats.prefill_layers) == (2, 6)
    assert stats.prefill_device == device and stats.prefill_seconds > 0
    assert stats.prefill_tokens_per_second == 0 and not stats.prefill_is_complete
    # What waiting for weights took of it is not known.
    assert (stats.prefill_compute_seconds > 0) == (device == "cpu")
    assert stats.decode_device == "" and stats.decode_tokens == 0
    stats = answer(session, PROMPT)[1][-1].stats
    assert stats.prefill_layers_done == stats.prefill_layers == 6 and stats.prefill_is_complete
    assert stats.decode_device == "cpu"


def test_a_cut_extend_says_how_far_it_came(open_streamed, monkeypatch):
    engine = open_streamed(MINI)
    engine.prefill_choice.gpu.max_tokens = 40
    session = engine.session()
    run_layer, passed = GpuSpan.run_layer, []

    def cut_at_the_ninth(span, cancel, window=0):
        passed.append(span)
        if len(passed) == 9:
            session.cancel()
        return run_layer(span, cancel, window)

    with monkeypatch.context() as patch:
        patch.setattr(GpuSpan, "run_layer", cut_at_the_ninth)
        assert session.extend(PROMPT, logits="all") is None
    stats = session.last_stats
    assert (stats.prefill_layers_done, stats.prefill_layers) == (8, 12)  # in two parts


def test_a_chat_names_a_prompt_that_goes_on(open_streamed, monkeypatch):
    conversation = Conversation(open_streamed(MINI))
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        for event in conversation.ask("What is the capital of Norway?", GREEDY):
            if isinstance(event, PrefillProgress) and event.layers_done == 3:
                conversation.cancel()
    assert conversation.used_tokens == 0  # the message was taken back
    (prompt, *_) = stats_rows(event)
    assert "interrupted at layer 3 of 6 after" in prompt[1] and "tok/s" not in prompt[1]
    events = list(conversation.ask("What is the capital of Norway?", GREEDY))
    assert conversation.used_tokens == event.stats.new_prompt_tokens + 8
    (prompt, *_) = stats_rows(events[-1])
    assert "resumed at layer 3 of 6, " in prompt[1] and "tok/s" not in prompt[1]
    progress = [event for event in events if isinstance(event, PrefillProgress)]
    assert {event.resumed_layers for event in progress} == {3}
    # What did not cross in this pass has no rate.
    assert [event.stream_bytes_per_second > 0 for event in progress] == [False] * 3 + [True] * 3


def test_a_resumed_prompt_can_be_cancelled_once_more(open_streamed, monkeypatch):
    engine = open_streamed(MINI)
    session = engine.session()
    want, _ = answer(engine.session(), PROMPT)
    for layers in (2, 4):
        with monkeypatch.context() as patch:
            stop_after(patch, 2)
            assert cancelled_after(session, PROMPT, layers) == layers
    got, events = answer(session, PROMPT)
    assert got == want and events[-1].stats.prefill_resumed_layers == 4


def test_what_was_cut_goes_with_its_session(open_streamed, monkeypatch):
    engine = open_streamed(MINI)
    session = engine.session()
    kept = []
    put = Shelf.put
    monkeypatch.setattr(
        Shelf, "put", lambda shelf, what: (kept.append(weakref.ref(what)), put(shelf, what))
    )
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        cancelled_after(session, PROMPT, 3)
    gc.collect()
    assert kept[0]() is not None
    session.close()
    del session
    for _ in range(100):  # the worker threads let go of its cache in their own time
        gc.collect()
        if kept[0]() is None:
            return
        time.sleep(0.02)
    pytest.fail("the layers are still there")


def test_a_cut_while_kept_layers_are_sent_again_keeps_all_of_them(open_streamed, monkeypatch):
    engine = open_streamed(MINI)
    session = engine.session()
    want, _ = answer(engine.session(), PROMPT)
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        cancelled_after(session, PROMPT, 4)
    channel = engine.decode.channel
    send = channel.send_packet

    def cut_at_the_second(packet, cancelled):
        if packet.layer == 1:
            session.cancel()
        return send(packet, cancelled)

    with monkeypatch.context() as patch:
        patch.setattr(channel, "send_packet", cut_at_the_second)
        stop_after(patch, 0)
        cancelled_after(session, PROMPT, 100)
    got, events = answer(session, PROMPT)
    assert got == want and events[-1].stats.prefill_resumed_layers == 4


@pytest.mark.parametrize("what", ["other ids", "other session", "a step", "other place", "no room"])
def test_what_was_cut_is_dropped_when_anything_else_comes(what, open_streamed, monkeypatch):
    engine = open_streamed(MINI, suspended_bytes=100 if what == "no room" else None)
    session = engine.session()
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        cancelled_after(session, PROMPT, 3)
    ids = PROMPT
    if what == "other ids":
        answer(session, PROMPT[:-2])
        session.rewind(0)
    elif what == "other session":
        answer(engine.session(), PROMPT)
    elif what == "a step":
        session.extend([5], logits="last")  # without prefill
        session.rewind(0)
    elif what == "other place":
        session.extend([5], logits=None)
        ids = PROMPT[1:]
    got, events = answer(session, ids)
    assert events[-1].stats.prefill_resumed_layers == 0
    fresh = engine.session()
    if what == "other place":
        fresh.extend([5], logits=None)
    assert got == answer(fresh, ids)[0]


def test_little_memory_streams_all_the_same(open_engine, open_streamed):
    want, _ = answer(open_engine(MINI).session(), PROMPT)
    engine = open_streamed(MINI, gpu_memory_bytes=48_000_000)
    assert engine.prefill_choice.gpu.max_tokens < engine.context_tokens
    assert answer(engine.session(), PROMPT)[0] == want
    with pytest.raises(DoesNotFit, match="streamed through this GPU"):
        open_streamed(MINI, gpu_memory_bytes=1_000_000)


def test_speculation_stays_exact(open_engine, open_streamed):
    """The draft layer is not streamed: it has no KV of the prompt, which costs hits alone."""
    folder = agreeing_folder()
    ids = [5 + i % 300 for i in range(60)]
    want, _ = answer(open_engine(folder, compute="exact").session(), ids)
    engine = open_streamed(folder, compute="exact", speculate=True)
    got, events = answer(engine.session(), ids)
    assert got == want and events[-1].stats.prefill_device == "torch-cpu"
    assert events[-1].stats.drafted > 0


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


def test_an_error_of_the_device_is_told_and_survived(open_streamed, monkeypatch):
    session = open_streamed(MINI).session()
    for error, named in (
        (torch.OutOfMemoryError("no room"), DoesNotFit),
        (RuntimeError("an illegal address\nCUDA kernel"), DeviceUnavailable),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(StreamPrefill, "run_layer", raises(error))
            with pytest.raises(named) as caught:
                answer(session, PROMPT)
            assert "CUDA" not in str(caught.value)
        session.rewind(0)
    assert len(answer(session, PROMPT)[0]) == 8


def raises(error):
    def call(*arguments, **more):
        raise error

    return call


def test_close_ends_threads_and_streams(open_streamed):
    before = set(threading.enumerate())
    engine = open_streamed(MINI)
    answer(engine.session(), PROMPT)
    engine.close()
    assert set(threading.enumerate()) <= before
