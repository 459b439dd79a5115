"""What nobody holds any more: requests whose handles are gone, caches and logits."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import numpy as np
import pytest
from oracles import MINI

from moechat import SamplingParams
from moechat.decode.worker import Call
from moechat.kv.tiers import Tier

ENDLESS = SamplingParams(temperature=0, ignore_end=True)
PROMPT = [0, 3, 1204, 5, 4]
WAIT_SECONDS = 20


def tokens_of(handle):
    return [event.token_id for event in handle if event.token_id is not None]


def becomes(condition):
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


class InCycle:
    """Keeps a handle and itself alive until the collector comes."""

    def __init__(self, handle):
        self.handle, self.itself = handle, self


class Collecting:
    """A policy that, on the prefill thread, waits for ``dropped`` and then collects."""

    name, window, centre_keys = "collecting", 0, False

    def __init__(self):
        self.dropped, self.ended = threading.Event(), threading.Event()

    def tiers(self, layer, first_position, num_tokens, mass_n=None):
        self.dropped.wait(WAIT_SECONDS)
        gc.collect()
        self.ended.set()
        return np.full(num_tokens, Tier.NATIVE, np.uint8)


def collect_on_decode(engine, ended):
    engine.decode.channel.send(Call(gc.collect, lambda *outcome: ended.set()))


def collect_with_locks(engine, ended):
    def collect():
        with engine.decode.channel._changed, engine.prefill._changed:
            gc.collect()
        ended.set()

    threading.Thread(target=collect, daemon=True).start()


@pytest.fixture
def by_hand():
    """The collector runs only when it is called."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def closing(events):
    """As a conversation reads a handle."""
    try:
        yield from events
    finally:
        events.close()


@pytest.mark.parametrize("read", [iter, closing])
@pytest.mark.parametrize("collect", [collect_on_decode, collect_with_locks])
def test_the_collector_ends_an_answer_wherever_it_runs(collect, read, open_engine, by_hand):
    engine, ended = open_engine(MINI), threading.Event()
    session = engine.session()
    events = read(session.generate(PROMPT, ENDLESS))
    while next(events).token_id is None:
        pass
    InCycle(events)
    del events
    collect(engine, ended)
    assert ended.wait(WAIT_SECONDS)
    assert becomes(lambda: not session._busy.locked())
    session.rewind(0)
    assert session.extend(PROMPT).shape[0] == len(PROMPT)


def test_the_collector_ends_a_prefill_on_its_own_thread(open_engine, by_hand):
    engine, policy = open_engine(MINI), Collecting()
    engine.kv_policy, session = policy, engine.session()
    InCycle(session.generate(PROMPT, ENDLESS))
    policy.dropped.set()
    assert policy.ended.wait(WAIT_SECONDS)
    assert becomes(lambda: not session._busy.locked())
    session.rewind(0)
    assert session.extend(PROMPT).shape[0] == len(PROMPT)


def test_an_idle_engine_keeps_no_cache_and_no_logits(open_engine):
    engine = open_engine(MINI)
    session = engine.session()
    logits = session.extend(PROMPT)
    watched = [weakref.ref(logits), weakref.ref(session.cache)]
    del logits, session
    assert becomes(lambda: all(reference() is None for reference in watched))


def test_an_interrupt_just_after_the_work_was_sent_cancels_it(open_engine, monkeypatch):
    engine = open_engine(MINI)
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_end=True)
    want = tokens_of(engine.session().generate(PROMPT, greedy))
    session, submit = engine.session(), engine.prefill.submit

    def interrupted(job):
        submit(job)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.prefill, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.generate([5 + i % 8000 for i in range(1500)], greedy)
    monkeypatch.undo()
    engine.session().extend(PROMPT)  # served after what was under way
    assert len(session) == len(session.cache) == 0
    assert tokens_of(session.generate(PROMPT, greedy)) == want
