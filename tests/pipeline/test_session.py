"""Sessions: timeline, rewind, cancel, and that no way of cutting the work changes its result."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from oracles import MINI, expected

from moechat import SamplingParams
from moechat.engine.requests import GenerateRequest
from moechat.errors import (
    BadParameter,
    DoesNotFit,
    EngineClosed,
    PromptEmpty,
    PromptTooLong,
    SessionBusy,
)
from moechat.events import Finished, PrefillProgress
from moechat.prefill.cpu import CpuPrefill

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_end=True)


def tokens_of(handle):
    return [event.token_id for event in handle if event.token_id is not None]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_is_told_and_does_not_wait(small_oracle, open_engine):
    """Threads stay in the process that started them: a child would wait for them forever."""
    engine = open_engine(small_oracle)
    session = engine.session()
    wanted = tokens_of(session.generate([5, 6], GREEDY))
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        code = 1
        try:
            with pytest.raises(EngineClosed, match="another process"):
                list(session.generate([7], GREEDY))
            session.rewind(1)
            session.close()
            engine.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert tokens_of(engine.session().generate([5, 6], GREEDY)) == wanted


@pytest.mark.parametrize("pause_seconds", [0, 0.2])
@pytest.mark.parametrize("max_tokens", [60, 200])  # in the pause decode ends, or fills its queue
def test_how_far_decode_ran_ahead_leaves_no_trace(
    small_oracle, open_engine, pause_seconds, max_tokens
):
    """The token that an answer was cut at is always prefilled by the next request."""
    session = open_engine(small_oracle).session()
    long = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_end=True)
    for event in session.generate([5, 6], long):
        if event.token_id is not None:
            time.sleep(pause_seconds)
            session.cancel()
    assert event.finish_reason == "cancelled"
    assert len(session.cache) == len(session) - 1


def test_extend_kinds(small_oracle, open_engine):
    session = open_engine(small_oracle, compute="exact").session()
    ids = expected(small_oracle)["prompt_1_ids"].tolist()
    assert session.extend(ids[:5], logits=None) is None
    assert session.extend(ids[5:9], logits="last").shape == (1, 320)
    assert session.extend(ids[9:]).shape == (len(ids) - 9, 320)
    assert session.extend([]).shape == (0, 320)
    again = session.extend([], logits="last")
    assert np.abs(again[0] - expected(small_oracle)["prompt_1_last_logits"]).max() < 1e-3
    assert len(session) == len(ids)


def test_bad_requests_change_nothing(small_oracle, open_engine):
    session = open_engine(small_oracle).session()
    session.extend([1, 2, 3], logits=None)
    for bad in ([320], [-1], [1, 10**12]):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            session.extend(bad)
        with pytest.raises(ValueError, match="outside the vocabulary"):
            session.generate(bad, GREEDY)
    with pytest.raises(ValueError, match="cannot rewind to 4"):
        session.rewind(4)
    with pytest.raises(ValueError):
        session.rewind(-1)
    with pytest.raises(PromptTooLong, match=r"has 303 tokens; the limit is 256"):
        session.extend([1] * 300)
    assert len(session) == 3
    assert session.rewind(3) == 0


def test_empty_timeline_cannot_be_continued(small_oracle, open_engine):
    with pytest.raises(PromptEmpty):
        open_engine(small_oracle).session().generate([], GREEDY)


def test_rewind_and_continue_equals_a_fresh_run(small_oracle, open_engine):
    engine = open_engine(small_oracle)
    ids = expected(small_oracle)["prompt_2_ids"].tolist()
    session = engine.session()
    first = tokens_of(session.generate(ids, GREEDY))
    assert len(session) == len(ids) + 16
    assert session.rewind(len(ids)) == 0
    assert tokens_of(session.generate([], GREEDY)) == first
    session.rewind(3)
    assert tokens_of(session.generate(ids[3:], GREEDY)) == first


def test_second_turn_equals_one_run_of_the_whole_timeline(open_engine):
    engine = open_engine(MINI, compute="exact")
    session = engine.session()
    tokens_of(session.generate([0, 3, 1204, 5, 4], SamplingParams(temperature=0, max_tokens=30)))
    turn = [3, 504, 354, 268, 3352, 2400, 318, 851, 280, 460, 35, 4]
    whole = [*session.timeline.ids, *turn]
    assert tokens_of(session.generate(turn, GREEDY)) == tokens_of(
        engine.session().generate(whole, GREEDY)
    )


def test_events_of_a_generation(open_engine):
    engine = open_engine(MINI)
    session = engine.session()
    events = list(session.generate([0, 3, 1204, 5, 4], SamplingParams(temperature=0)))
    progress = [event for event in events if isinstance(event, PrefillProgress)]
    assert [event.layers_done for event in progress] == list(range(1, 7))
    *tokens, last = [event for event in events if event not in progress]
    assert isinstance(last, Finished)
    assert last.finish_reason == "stop"
    assert [event.finish_reason for event in tokens] == [None] * len(tokens)
    assert tokens[-1].token_id == 1  # the end token counts and stays on the timeline
    assert session.timeline.ids[-1] == 1
    assert "".join(event.text for event in events) == "Hello! How can I assist you today?"
    assert (last.stats.new_prompt_tokens, last.stats.cached_prompt_tokens) == (5, 0)
    assert last.stats.decode_tokens == len(tokens) == 10
    assert 0 < last.stats.first_token_seconds < 10
    assert len(session.cache) == len(session) - 1


def test_length_and_context_end_an_answer(small_oracle, open_engine):
    engine = open_engine(small_oracle, context_tokens=40)
    ids = expected(small_oracle)["prompt_1_ids"].tolist()
    *_, last = engine.session().generate(ids, GREEDY)
    assert last.finish_reason == "length"
    unlimited = SamplingParams(temperature=0, ignore_end=True)
    events = list(engine.session().generate(ids, unlimited))
    assert events[-1].finish_reason == "context"
    assert len(tokens_of(iter(events))) == 40 - len(ids)
    with pytest.raises(PromptTooLong, match="fills the context of 40"):
        engine.session().generate([1] * 40, GREEDY)
    with pytest.raises(BadParameter, match="trained for 256"):
        open_engine(small_oracle, context_tokens=257)


def test_same_seed_same_tokens_whatever_came_before(open_engine):
    engine = open_engine(MINI)
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=40)
    prompt = [0, 3, 508, 397, 262, 366, 330, 262, 4031, 18, 4]  # a story
    first = tokens_of(engine.session().generate(prompt, params))
    session = engine.session()
    tokens_of(session.generate([0, 3, 1526], GREEDY))
    session.rewind(0)
    assert tokens_of(session.generate(prompt, params)) == first
    other = SamplingParams(temperature=1.0, seed=8, max_tokens=40)
    assert tokens_of(engine.session().generate(prompt, other)) != first


def test_cancel_while_decoding_keeps_what_was_read(open_engine):
    engine = open_engine(MINI)
    session = engine.session()
    handle = session.generate([0, 3, 508, 397, 262, 366, 4], SamplingParams(ignore_end=True))
    read = []
    started = None
    for event in handle:
        if event.token_id is not None:
            read.append(event.token_id)
        if len(read) == 5 and started is None:
            started = time.monotonic()
            session.cancel()
    assert time.monotonic() - started < 0.3
    assert event.finish_reason == "cancelled"
    assert session.timeline.ids[7:] == read
    assert len(session.cache) <= len(session)
    assert len(tokens_of(session.generate([3, 1204, 5, 4], GREEDY))) == 16


def test_cancel_while_prefilling(open_engine, monkeypatch):
    run_layer, layers, second = CpuPrefill.run_layer, itertools.count(), threading.Event()

    def run_layer_slowly(prefill, cancel, window=0):
        layer = next(layers)
        if layer == 1:
            second.set()
        while layer > 1 and not cancel.raised:  # however fast the machine is
            time.sleep(0.001)
        return run_layer(prefill, cancel, window)

    monkeypatch.setattr(CpuPrefill, "run_layer", run_layer_slowly)
    engine = open_engine(MINI)
    session = engine.session()
    handle = session.generate([5 + i % 8000 for i in range(4000)], GREEDY)
    assert second.wait(30)
    started = time.monotonic()
    handle.cancel()
    *_, last = handle
    assert time.monotonic() - started < 0.3
    assert last.finish_reason == "cancelled"
    assert len(session.cache) == 0
    monkeypatch.undo()
    session.rewind(0)
    assert len(tokens_of(session.generate([0, 3, 1204, 5, 4], GREEDY))) == 16


def test_cancelled_extend_leaves_the_timeline_as_before(open_engine):
    session = open_engine(MINI).session()
    session.extend([0, 3, 5], logits=None)
    timer = threading.Timer(0.05, session.cancel)
    timer.start()
    assert session.extend([5 + i % 8000 for i in range(4000)], logits=None) is None
    timer.join()
    assert session.timeline.ids == [0, 3, 5]
    assert len(session.cache) == 3


def test_dropped_handles_free_the_session(open_engine):
    session = open_engine(MINI).session()
    endless = SamplingParams(temperature=0, ignore_end=True)
    for _ in session.generate([0, 3, 1204, 5, 4], endless):
        break
    session.rewind(0)
    session.generate([0, 3, 1204, 5, 4], endless)  # never iterated
    assert len(session) == 5
    session.rewind(0)
    assert len(tokens_of(session.generate([0, 3, 1204, 5, 4], GREEDY))) == 16


def test_an_interrupted_extend_leaves_a_session_that_computes_right(open_engine):
    engine = open_engine(MINI)
    session = engine.session()
    session.extend([5 + i % 8000 for i in range(1500)], logits=None)
    timer = threading.Timer(0.03, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        session.extend([5 + i % 8000 for i in range(2500)], logits=None)
        time.sleep(1)  # the signal may come late, never into the next line
    timer.join()
    session.rewind(min(len(session), 1500))
    session.rewind(0)
    assert len(session.cache) == 0
    fresh = tokens_of(engine.session().generate([7, 8, 9], GREEDY))
    assert tokens_of(session.generate([7, 8, 9], GREEDY)) == fresh


def test_closed_and_foreign_sessions_are_refused(open_engine):
    engine, other = open_engine(MINI), open_engine(MINI)
    session = engine.session()
    session.extend([1, 2, 3], logits=None)
    with pytest.raises(BadParameter, match="another engine"):
        other.submit(GenerateRequest(session, [1], GREEDY))
    session.close()
    assert len(session.cache) == 0
    with pytest.raises(EngineClosed, match="session is closed"):
        session.extend([1])
    assert len(tokens_of(engine.session().generate([0, 3, 4], GREEDY))) == 16


def test_a_failure_in_the_decode_thread_is_told_and_survived(open_engine, monkeypatch):
    engine = open_engine(MINI)

    def broken(*arguments):
        raise MemoryError("no memory")

    monkeypatch.setattr("moechat._native.generate", broken)
    with pytest.raises(DoesNotFit):
        tokens_of(engine.session().generate([0, 3, 1204, 5, 4], GREEDY))
    monkeypatch.undo()
    assert len(tokens_of(engine.session().generate([0, 3, 1204, 5, 4], GREEDY))) == 16


def test_a_script_may_end_in_the_middle_of_an_answer():
    code = (
        "from moechat import Engine, SamplingParams\n"
        "session = Engine.open('mini', threads=2).session()\n"
        "handle = session.generate([0, 3, 5, 4], SamplingParams(ignore_end=True))\n"
        "print([next(handle).token_id is None for _ in range(20)][-1])\n"
    )
    for _ in range(3):
        ended = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
        )
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "False\n", "")


def test_bad_arguments_are_refused(open_engine):
    engine = open_engine(MINI)
    with pytest.raises(TypeError):
        engine.session().extend([1.7])
    with pytest.raises(BadParameter, match="threads"):
        open_engine(MINI, threads=0)


def test_an_abandoned_generation_frees_the_session(open_engine):
    session = open_engine(MINI).session()
    handle = session.generate([0, 3, 1204, 5, 4], SamplingParams(ignore_end=True))
    next(handle)
    with pytest.raises(SessionBusy):
        session.generate([3], GREEDY)
    handle.close()
    session.rewind(0)
    assert len(tokens_of(session.generate([0, 3, 1204, 5, 4], GREEDY))) == 16


def test_two_sessions_decode_together_as_if_alone(open_engine):
    engine = open_engine(MINI)
    prompts = [[0, 3, 1204, 5, 4], [0, 3, 1526, 354, 268, 1466, 1041, 35, 4]]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_end=True)
    alone = [tokens_of(engine.session().generate(prompt, params)) for prompt in prompts]
    handles = [engine.session().generate(prompt, params) for prompt in prompts]
    assert [tokens_of(handle) for handle in handles] == alone


def test_close_ends_everything(open_engine):
    engine = open_engine(MINI)
    session = engine.session()
    handle = session.generate([0, 3, 1204, 5, 4], SamplingParams(ignore_end=True))
    next(event for event in handle if event.token_id is not None)  # the prompt has been read
    before = threading.active_count()
    engine.close()
    engine.close()
    assert threading.active_count() < before
    with pytest.raises(EngineClosed):
        session.extend([1])
    with pytest.raises(EngineClosed):
        engine.session()
    handle.close()
    assert session.rewind(1) == 0  # of the one token none is to be prefilled
