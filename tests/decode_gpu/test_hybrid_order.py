"""Hybrid decode when things happen in an awkward order; nobody waits for what is not his."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest
from oracles import SMALL_ORACLE, oracle_folder

from moechat import SamplingParams
from moechat.errors import DoesNotFit

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")
from hybrid_engine import with_hybrid  # noqa: E402

from moechat.decode.gpu import device_cache, hybrid_step  # noqa: E402

IDS = [5, 9, 33, 7, 21]
LONG = 200


pytestmark = pytest.mark.usefixtures("one_torch_thread")


def begin(engine, max_tokens=6, ids=IDS, session=None):
    session = engine.session() if session is None else session
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_end=True)
    return session.generate(ids, params)


def answer(engine, max_tokens=6, **settings):
    handle = begin(engine, max_tokens, **settings)
    tokens = [event.token_id for event in handle if event.token_id is not None]
    return tokens, handle.result().finish_reason


def until(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_step_that_ended_before_its_abort_leaves_nothing_to_the_next(engine, monkeypatch):
    want = answer(engine)
    hybrid, session = engine.decode.device, engine.session()

    def ended(timeout_seconds):
        until(hybrid.lanes[0].ended)
        session.cancel()
        return None, False

    monkeypatch.setattr(hybrid._experts, "ended", ended)
    assert answer(engine, session=session)[1] == "cancelled"
    monkeypatch.undo()
    assert answer(engine) == want


def test_a_look_that_comes_late_does_not_count_a_step_twice(engine, monkeypatch):
    want = answer(engine, 4), answer(engine, 8)
    hybrid = engine.decode.device
    real, looks = hybrid._experts.ended, []
    slow = hybrid.lanes[1]._step  # the other's last news is there before its own

    def run(*args, real=slow.run):
        time.sleep(0.02)
        return real(*args)

    monkeypatch.setattr(slow, "run", run)

    def ended(timeout_seconds):
        if not looks and len(hybrid._experts._memory) == sum(bool(x.rows) for x in hybrid.lanes):
            until(hybrid.lanes[0].ended)
            looks.append(0)
        if len(looks) in (1, 2):
            looks.append(0)
            return None, True  # they lay before the news of the step
        return real(timeout_seconds)

    monkeypatch.setattr(hybrid._experts, "ended", ended)
    handles = [begin(engine, 4), begin(engine, 8)]
    got = []
    for handle in handles:
        tokens = [event.token_id for event in handle if event.token_id is not None]
        got.append((tokens, handle.result().finish_reason))
    assert tuple(got) == want and looks


@pytest.fixture
def two_at_work(engine, monkeypatch):
    """(engine, a handle whose answer goes on for long, one that has no room for more tokens)."""
    lanes = engine.decode.device.lanes
    for lane in lanes:
        monkeypatch.setattr(lane, "begin", lambda rows, b=lane.begin: (time.sleep(2e-3), b(rows)))
    full, busy = begin(engine, LONG), begin(engine, LONG)
    tokens = []
    reader = threading.Thread(target=lambda: tokens.extend(busy))
    reader.start()
    until(lambda: len(tokens) > 80)  # the other has had 64
    yield engine, reader, full
    reader.join(30)
    assert len([event for event in tokens if event.token_id is not None]) == LONG


def test_who_sits_out_is_cancelled_at_once(two_at_work):
    _, reader, full = two_at_work
    full.close()
    assert reader.is_alive()


def test_who_sat_out_goes_on_when_there_is_room(two_at_work):
    _, reader, full = two_at_work
    for _ in range(100):
        next(full)
    assert reader.is_alive()
    full.close()


def test_interrupts_leave_nobody_behind(open_engine, monkeypatch):
    """More sessions than a step has rows, and a message after every step."""
    folder = oracle_folder(SMALL_ORACLE)
    engine = open_engine(folder)
    hybrid = with_hybrid(engine, folder, anti_phase=False)
    begun, sessions = [], [engine.session() for _ in range(17)]
    real = hybrid.lanes[0].begin

    def begin_step(rows):
        begun.append({row.cache.session for row in rows})
        engine.decode._interrupt.raise_()
        real(rows)

    monkeypatch.setattr(hybrid.lanes[0], "begin", begin_step)
    handles = [begin(engine, 20, session=session) for session in sessions]
    for handle in handles:
        assert len([event for event in handle if event.token_id is not None]) == 20
    all_there = next(i for i in range(len(begun)) if len(begun[i] | begun[i + 1]) == 17)
    for one, next_one in zip(begun[all_there::2][:10], begun[all_there + 1 :: 2]):
        assert not one & next_one


def test_a_lane_that_failed_does_not_wait_for_the_other(engine, monkeypatch):
    real, failing = hybrid_step.HybridStep.run, engine.decode.device.lanes[1]

    def run(self, *args):
        if self is failing._step:
            raise RuntimeError("out of luck")
        return real(self, *args)

    monkeypatch.setattr(hybrid_step.HybridStep, "run", run)
    steps, lane = [], engine.decode.device.lanes[0]
    monkeypatch.setattr(lane, "begin", lambda rows, b=lane.begin: (steps.append(0), b(rows)))
    handles = [begin(engine, LONG) for _ in range(2)]
    for handle in handles:
        with pytest.raises(RuntimeError, match="out of luck"):
            list(handle)
    assert len(steps) < LONG // 4


def test_memory_that_was_refused_once_may_be_enough_later(open_engine, monkeypatch):
    monkeypatch.setattr(device_cache, "_LEAST_SLOTS", 64)
    folder = oracle_folder(SMALL_ORACLE)
    engine, plain = open_engine(folder, compute="exact"), open_engine(folder, compute="exact")
    caches = with_hybrid(engine, folder).caches
    real = caches._allocate

    def allocate(layer, slabs, slots):
        if slots > 64 and layer == 1:
            raise torch.OutOfMemoryError("out of luck")
        return real(layer, slabs, slots)

    ids = np.random.default_rng(1).integers(3, engine.spec.vocab_size, 100).tolist()
    monkeypatch.setattr(caches, "_allocate", allocate)
    assert answer(engine, ids=ids) == answer(plain, ids=ids)  # by the CPU
    assert caches.slots_SCW[0].shape[1] > 64
    handles = [begin(engine) for _ in range(3)]  # more slabs, of fewer slots than the first layer's
    for handle in handles:
        assert [e.token_id for e in handle if e.token_id is not None] == answer(plain)[0]
    monkeypatch.undo()
    assert answer(engine, ids=ids) == answer(plain, ids=ids)


def test_idle_sessions_make_room_for_a_long_one(open_engine, monkeypatch):
    monkeypatch.setattr(device_cache, "_LEAST_SLOTS", 64)
    folder = oracle_folder(SMALL_ORACLE)
    engine, plain = open_engine(folder, compute="exact"), open_engine(folder, compute="exact")
    caches = with_hybrid(engine, folder).caches
    caches._limit_bytes = caches._bytes(8, 64)
    idle = [engine.session() for _ in range(6)]
    for session in idle:
        assert answer(engine, session=session) == answer(plain)
    assert caches._bytes(2, 256) <= caches._limit_bytes
    long = engine.session()
    ids = np.random.default_rng(1).integers(3, engine.spec.vocab_size, 100).tolist()
    assert answer(engine, ids=ids, session=long) == answer(plain, ids=ids)
    caches.reserve([long.cache])
    with pytest.raises(DoesNotFit, match="KV caches"):
        caches.reserve([long.cache, *(session.cache for session in idle)])
    for session in idle:
        session.rewind(0)
        assert answer(engine, session=session) == answer(plain)


MAIN_THREAD_ENDS_FIRST = """
import sys, threading
from moechat import Engine, SamplingParams

engine = Engine.open("mini", threads=1, device="torch-cpu", gpu_decode="on")
params = SamplingParams(temperature=0, max_tokens=60, ignore_end=True)
handle = engine.session().generate([5, 9, 33], params)
threading.Thread(target=lambda: print(sum(e.token_id is not None for e in handle))).start()
"""


def test_an_answer_outlives_the_main_thread():
    done = subprocess.run(
        [sys.executable, "-c", MAIN_THREAD_ENDS_FIRST],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "60\n")


def test_a_closed_engine_holds_nothing_on_the_device(open_engine):
    """At once: the next engine looks at what memory is free."""
    folder = oracle_folder(SMALL_ORACLE)
    engine = open_engine(folder)
    hybrid = with_hybrid(engine, folder)
    answer(engine)
    held = [weakref.ref(part) for part in (hybrid.weights, hybrid.caches, hybrid.lanes[0])]
    del hybrid
    gc.collect()
    gc.disable()
    try:
        engine.close()
        assert [part() for part in held] == [None] * 3
    finally:
        gc.enable()
