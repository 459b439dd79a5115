"""Prompts that are cancelled while they are read by streamed prefill, and come again."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
from oracles import MINI, expected

from moechat.engine.conversation import Conversation
from moechat.events import PrefillProgress
from moechat.prefill.cpu import CpuPrefill
from moechat.prefill.suspended import Shelf
from moechat.terminal.stats_text import stats_rows

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")

from streamed_engine import GREEDY, PROMPT, answer, cancelled_after, slots_of, stop_after  # noqa: E402

from moechat.prefill.gpu.gpu_prefill import GpuSpan  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_torch_thread")


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
    progress = [event for event in events if isinstance(event, PrefillProgress)]
    assert [event.resumed_layers for event in progress] == [layers] * 6
    layer_bytes = engine.prefill_choice.gpu.pass_bytes / 6
    for event in progress:  # what was kept did not cross the link once more
        streamed = max(event.layers_done - layers, 0) * layer_bytes
        assert event.stream_bytes_per_second * event.seconds == pytest.approx(streamed)
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


def test_what_was_cut_goes_when_the_engine_is_closed(open_streamed, monkeypatch):
    """Though somebody holds the session."""
    engine = open_streamed(MINI)
    session = engine.session()
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        cancelled_after(session, PROMPT, 3)
    shelf = engine.prefill._passes._shelf
    assert shelf._kept is not None
    engine.close()
    assert shelf._kept is None


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
