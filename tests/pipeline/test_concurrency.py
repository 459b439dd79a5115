"""Several sessions on one engine: nobody's tokens or KV depend on what the others do."""

from __future__ import annotations

import io
import random
import threading

import pytest
from oracles import MINI
from session_record import answer, kv_bytes

from moechat import SamplingParams
from moechat.batch.runner import run_batch
from moechat.engine.conversation import Conversation
from moechat.engine.requests import ExtendRequest, GenerateRequest
from moechat.errors import DoesNotFit
from moechat.events import Finished, Queued
from moechat.prefill import cpu as prefill_cpu
from moechat.prefill.cpu import CpuPrefill

TOKENS = 24
WAIT_SECONDS = 30


def params(seed, max_tokens=TOKENS):
    """Greedy for even seeds; sampled, and with a penalty, for odd ones."""
    return SamplingParams(
        temperature=seed % 2, seed=seed, max_tokens=max_tokens, ignore_end=True,
        repetition_penalty=1.1 if seed % 2 else 1.0,
    )  # fmt: skip


def prompt(engine, seed, length=None):
    source = random.Random(seed)
    length = length or source.randint(2, 40)
    return [source.randrange(3, engine.spec.vocab_size) for _ in range(length)]


def alone(engine, seed, max_tokens=TOKENS):
    session = engine.session()
    tokens, _ = answer(session, prompt(engine, seed), params(seed, max_tokens))
    kv = kv_bytes(session)
    session.close()
    return tokens, kv


def in_threads(works):
    """Run all at once; the results in order."""
    results, errors = [None] * len(works), []
    gate = threading.Barrier(len(works))

    def run(place, work):
        try:
            gate.wait(WAIT_SECONDS)
            results[place] = work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=item) for item in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()
    assert errors == []
    return results


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_are_those_of_a_run_alone_beside_others_and_a_prefill(
    pipeline_oracle, open_engine, threads
):
    """20 sessions: more than the rows of one chunk of a step; a long prompt is read meanwhile."""
    with_one_thread = open_engine(pipeline_oracle, threads=1)
    wanted = [alone(with_one_thread, seed) for seed in range(20)]
    engine = open_engine(pipeline_oracle, threads=threads)
    reader = engine.session()
    # Long enough that it is still being read when the others begin.
    long = prompt(engine, 99, min(engine.context_tokens, 1500))
    reading = engine.submit(ExtendRequest(reader, long, None))
    got = in_threads([lambda seed=seed: alone(engine, seed) for seed in range(20)])
    reading.result()
    assert got == wanted
    assert len(reader.cache) == len(long)


def test_prefill_beside_decode_gives_the_kv_of_a_run_alone(pipeline_oracle, open_engine):
    engine = open_engine(pipeline_oracle)
    long = prompt(engine, 5, 96)
    session = engine.session()
    session.extend(long, logits=None)
    wanted = kv_bytes(session)
    other = engine.session()
    decoding = other.generate([5], params(2, engine.context_tokens))
    assert next(decoding).token_id is not None
    for _ in range(3):
        beside = engine.session()
        beside.extend(long, logits=None)
        assert kv_bytes(beside) == wanted
    assert next(decoding).token_id is not None
    decoding.close()


def test_stress_of_random_starts_and_cancels(small_oracle, open_engine):
    """What a cancelled answer gave is the beginning of the whole one; the next request is right."""
    engine = open_engine(small_oracle)
    wanted = {seed: alone(engine, seed, 60)[0] for seed in range(12)}
    before = set(threading.enumerate())

    def talk(number):
        source = random.Random(number)
        session = engine.session()
        for _ in range(12):
            seed = source.randrange(12)
            ids = prompt(engine, seed)
            handle = session.generate(ids, params(seed, 60))
            stop_after = source.choice([None, 0, 0, 1, 5, 30])
            if stop_after == 0:
                handle.cancel()
            tokens = []
            for event in handle:
                if event.token_id is not None:
                    tokens.append(event.token_id)
                    if len(tokens) == stop_after:
                        session.cancel()
            assert isinstance(event, Finished)
            if stop_after is None:
                assert (tokens, event.finish_reason) == (wanted[seed], "length")
            else:
                assert tokens == wanted[seed][: len(tokens)]
                assert event.finish_reason == "cancelled"
                assert len(tokens) <= stop_after
            assert len(session) == len(ids) + len(tokens)
            assert len(session.cache) < max(len(session), 1)
            session.rewind(0)
            assert len(session.cache) == 0
        session.close()
        return True

    assert in_threads([lambda number=number: talk(number) for number in range(8)]) == [True] * 8
    assert set(threading.enumerate()) == before
    assert alone(engine, 3, 60)[0] == wanted[3]


class Gate:
    """Holds every prefill before its first layer until it is opened."""

    def __init__(self, monkeypatch):
        self.open, self.entered = threading.Event(), threading.Event()
        gate = self

        class Held(CpuPrefill):
            def run_layer(self, cancel, *more):
                gate.entered.set()
                assert gate.open.wait(WAIT_SECONDS)
                return super().run_layer(cancel, *more)

        monkeypatch.setattr(prefill_cpu, "CpuPrefill", Held)


def test_waiting_requests_say_so_are_served_in_order_and_can_be_cancelled(
    small_oracle, open_engine, monkeypatch
):
    engine = open_engine(small_oracle)
    wanted = {seed: alone(engine, seed)[0] for seed in (1, 2, 3)}
    gate = Gate(monkeypatch)
    sessions = [engine.session() for _ in range(3)]
    handles = []
    for seed, session in zip((1, 2, 3), sessions, strict=True):
        request = GenerateRequest(session, prompt(engine, seed), params(seed))
        handles.append(engine.submit(request))
        assert gate.entered.wait(WAIT_SECONDS)
    assert next(handles[1]) == Queued(ahead=1)
    assert next(handles[2]) == Queued(ahead=2)
    handles[1].cancel()  # needs no turn: the first is still held
    assert [event.finish_reason for event in handles[1]] == ["cancelled"]
    assert next(handles[2]) == Queued(ahead=1)
    gate.open.set()
    for place in (0, 2):
        events = list(handles[place])
        tokens = [event.token_id for event in events if event.token_id is not None]
        assert tokens == wanted[place + 1]
        waited = events[-1].stats.queued_seconds
        assert waited > 0 and (place == 0) == (waited < events[-1].stats.first_token_seconds / 2)
    sessions[1].rewind(0)
    assert answer(sessions[1], prompt(engine, 2), params(2))[0] == wanted[2]


def test_a_closed_engine_lets_go_of_who_waits(small_oracle, open_engine, monkeypatch):
    engine = open_engine(small_oracle)
    gate = Gate(monkeypatch)
    handles = [engine.session().generate(prompt(engine, seed), params(seed)) for seed in (1, 2)]
    assert gate.entered.wait(WAIT_SECONDS)
    closing = threading.Thread(target=engine.close)
    closing.start()
    gate.open.set()
    closing.join(WAIT_SECONDS)
    assert not closing.is_alive()
    assert [list(handle)[-1].finish_reason for handle in handles] == ["cancelled"] * 2


def test_admission_says_how_many_fit(small_oracle, open_engine, monkeypatch):
    engine = open_engine(small_oracle, context_tokens=64)
    one = engine.spec.num_layers * engine.spec.kv_width * 2 * 64
    assert engine.session_bytes == one
    for free, fit in ((10 * one, 9), (one, 0), (None, None)):
        monkeypatch.setattr("moechat.engine.engine.free_memory_bytes", lambda free=free: free)
        assert engine.sessions_that_fit() == fit
        if fit is None:
            engine.admit(1000)
            continue
        engine.admit(fit)
        with pytest.raises(DoesNotFit, match=f"{fit + 1} conversations .*; {fit} would"):
            engine.admit(fit + 1)
    exact = open_engine(small_oracle, context_tokens=64, compute="exact")
    assert exact.session_bytes == 2 * one


def test_a_session_holds_what_admission_counts(small_oracle, open_engine):
    engine = open_engine(small_oracle, context_tokens=64)
    session = engine.session()
    session.extend(prompt(engine, 1, 64), logits=None)
    assert sum(map(len, kv_bytes(session))) == engine.session_bytes


def test_a_batch_gives_the_same_bytes_at_any_concurrency(open_engine):
    engine = open_engine(MINI)
    lines = b"What is the capital of Norway?\n{broken\n\nWho are you?\nWhat is 7 plus 8?\n" * 2
    sampling = SamplingParams(temperature=0.8, seed=3, max_tokens=20)

    class NoInterrupt:
        requested = False

    written = []
    for count in (1, 4, 7):
        sink = io.BytesIO()
        conversations = [Conversation(engine) for _ in range(count)]
        outcome = run_batch(io.BytesIO(lines), sink, conversations, sampling, NoInterrupt())
        assert (outcome.num_results, outcome.num_failed, outcome.next_line) == (8, 2, 10)
        written.append(sink.getvalue())
    assert written[1:] == written[:1] * 2
