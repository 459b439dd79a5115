"""Prompts that are cancelled while they are read by streamed prefill, and come again."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
from oracles import MINI, expected

from moechat.events import PrefillProgress
from moechat.prefill.suspended import Shelf

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")

from streamed_engine import GREEDY, PROMPT, answer, cancelled_after, slots_of, stop_after  # noqa: E402

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
    assert [event.resumed_layers for event in progress] == [min(n, layers) for n in range(1, 7)]
    layer_bytes = engine.prefill_choice.gpu.pass_bytes / 6
    for event in progress:  # what was kept did not cross the link once more
        streamed = (event.layers_done - event.resumed_layers) * layer_bytes
        assert event.stream_bytes_per_second * event.seconds == pytest.approx(streamed)
    for ours, theirs in zip(slots_of(session), slots_of(whole), strict=True):
        assert (ours == theirs).all()


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
