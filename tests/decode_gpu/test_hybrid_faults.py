"""Hybrid decode when something is cut or goes wrong; the next step must not feel it."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from oracles import SMALL_ORACLE, oracle_folder

from moechat import SamplingParams
from moechat.decode.worker import Call
from moechat.errors import DoesNotFit, EngineClosed, MoechatError, NonFiniteLogits

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")
from hybrid_engine import with_hybrid  # noqa: E402

from moechat.decode.gpu import device_cache, hybrid_step, ops  # noqa: E402
from moechat.decode.gpu import mailbox as plain_mailbox  # noqa: E402

IDS = [5, 9, 33, 7, 21]


pytestmark = pytest.mark.usefixtures("one_torch_thread")


def answer(engine, ids=IDS, max_tokens=6, session=None):
    session = engine.session() if session is None else session
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_end=True)
    handle = session.generate(ids, params)
    tokens = [event.token_id for event in handle if event.token_id is not None]
    return tokens, handle.result().finish_reason


def test_cancel_ends_a_step_that_nobody_serves(engine, monkeypatch):
    want = answer(engine)
    hybrid, session = engine.decode.device, engine.session()
    monkeypatch.setattr(hybrid._experts, "start", lambda: None)
    got = []
    thread = threading.Thread(target=lambda: got.append(answer(engine, session=session)))
    thread.start()
    while not hybrid.lanes[0].rows:
        time.sleep(0.001)
    time.sleep(0.05)
    assert not hybrid.lanes[0].ended()
    began = time.monotonic()
    session.cancel()
    thread.join(10)
    assert time.monotonic() - began < 2
    assert got == [([], "cancelled")]
    assert len(session.cache) == len(IDS) - 1
    monkeypatch.undo()
    session.rewind(0)
    assert answer(engine, session=session) == want
    assert answer(engine) == want


def test_cancel_that_comes_as_a_step_ends(engine, monkeypatch):
    """It was given up, and is whole all the same: the next one must be served."""
    want = answer(engine)
    hybrid, session = engine.decode.device, engine.session()
    real = hybrid._experts.ended

    def ended(timeout_seconds):
        number, look = real(timeout_seconds)
        if number is None:
            return number, look
        while not hybrid.lanes[number].ended():
            time.sleep(0.001)
        session.cancel()
        return None, False

    with monkeypatch.context() as patch:
        patch.setattr(hybrid._experts, "ended", ended)
        assert answer(engine, session=session)[1] == "cancelled"
    session.rewind(0)
    assert answer(engine, session=session) == want


def test_a_cancelled_session_leaves_the_others_alone(engine):
    want = answer(engine, max_tokens=12)
    sessions = [engine.session() for _ in range(3)]
    got = [None] * 3

    def run(number):
        got[number] = answer(engine, max_tokens=12 if number else 400, session=sessions[number])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    sessions[0].cancel()
    for thread in threads:
        thread.join(20)
    assert got[1] == got[2] == want
    assert got[0][1] in ("cancelled", "context")


def test_a_request_that_makes_no_sense(engine, monkeypatch):
    want = answer(engine)

    def post(x, ids, weights, mailbox):
        real(x, torch.full_like(ids, 10**6), weights, mailbox)

    real = plain_mailbox.post
    monkeypatch.setattr(plain_mailbox, "post", post)
    session = engine.session()
    with pytest.raises(MoechatError, match="out of range"):
        answer(engine, session=session)
    monkeypatch.undo()
    session.rewind(0)
    assert answer(engine, session=session) == want


def test_a_step_that_throws(engine, monkeypatch):
    want = answer(engine)
    calls = []

    def linear(*args, **settings):
        calls.append(0)
        if len(calls) == 20:
            raise RuntimeError("out of luck")
        return real(*args, **settings)

    real = ops.linear
    monkeypatch.setattr(hybrid_step.ops, "linear", linear)
    with pytest.raises(RuntimeError, match="out of luck"):
        answer(engine)
    monkeypatch.undo()
    assert answer(engine) == want


def test_nan_fails_its_own_row_alone(engine, monkeypatch):
    want = answer(engine, max_tokens=12)
    weights = engine.decode.device.weights
    real = weights.embed

    def embed(ids):
        values = np.array(real(ids))
        values[np.array(ids) == 50] = np.nan
        return values

    monkeypatch.setattr(weights, "embed", embed)
    failed, session = [], engine.session()

    def run():
        with pytest.raises(NonFiniteLogits, match="layer") as error:
            answer(engine, ids=[7, 8, 50], session=session)
        failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert answer(engine, max_tokens=12) == want
    thread.join(20)
    assert len(failed) == 1
    monkeypatch.undo()
    session.rewind(0)
    assert answer(engine, max_tokens=12, session=session) == want


def test_a_window_whose_copy_is_taken_anew(open_engine, monkeypatch):
    monkeypatch.setattr(device_cache, "_WINDOW_SLACK", 600)
    folder = oracle_folder("mistral_swa")
    engine, plain = (open_engine(folder, compute="exact") for _ in range(2))
    caches = with_hybrid(engine, folder).caches
    assert caches.slots_SCW[0].shape[1] == 624
    ids = np.random.default_rng(1).integers(3, engine.spec.vocab_size, 590).tolist()
    assert engine.context_tokens > 670
    assert answer(engine, ids, 70) == answer(plain, ids, 70)


def test_caches_that_do_not_fit_are_decoded_on_the_cpu(open_engine, monkeypatch):
    monkeypatch.setattr(device_cache, "_LEAST_SLOTS", 64)
    folder = oracle_folder(SMALL_ORACLE)
    engine, plain = open_engine(folder, compute="exact"), open_engine(folder, compute="exact")
    hybrid = with_hybrid(engine, folder, kv_limit_bytes=1)
    steps = []
    monkeypatch.setattr(
        hybrid.lanes[0], "begin", lambda rows, b=hybrid.lanes[0].begin: steps.append(b(rows))
    )
    ids = np.random.default_rng(1).integers(3, engine.spec.vocab_size, 50).tolist()
    assert answer(engine, ids, 30) == answer(plain, ids, 30)
    assert len(steps) == 64 - 49  # the least number of slots is always there
    session = engine.session()
    list(session.generate(ids, SamplingParams(temperature=0, max_tokens=30, ignore_end=True)))
    assert session.last_stats.decode_device == "torch-cpu, cpu"
    session.close()
    hybrid.caches.reserve([])
    with pytest.raises(DoesNotFit, match="KV caches"):
        hybrid.caches.reserve([engine.session().cache for _ in range(2)])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [RuntimeError("the device failed"), OSError("whatever else")])
def test_a_device_that_fails_at_close_keeps_nobody_waiting(error, engine, monkeypatch):
    worker, heard = engine.decode, []

    def fail():  # somebody asks for something in the last moment
        worker.channel.send(Call(lambda: None, lambda _, refused: heard.append(refused)))
        raise error

    hybrid = worker.device
    monkeypatch.setattr(hybrid, "close", fail)
    engine.close()
    assert [type(refused) for refused in heard] == [EngineClosed]
    assert worker.device is None
    with pytest.raises(EngineClosed):
        worker.channel.send(Call(lambda: None, lambda *_: None))
    monkeypatch.undo()
    hybrid.close()
