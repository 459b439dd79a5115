"""Ctrl-C: the first ends the measurement, further ones lose no figures."""

from __future__ import annotations

import io
import os
import signal

import pytest

from moechat.bench.status_line import StatusLine
from moechat.eval import outcome as outcome_module
from moechat.eval.outcome import HELD_SECONDS, Outcome


@pytest.fixture
def stderr():
    return io.StringIO()


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_further_ones_are_held_back_once_the_first_came(stderr):
    before = signal.getsignal(signal.SIGINT)
    with Outcome(StatusLine(stderr)) as outcome:
        with outcome.measuring():
            try:
                interrupt()
                pytest.fail("the first one ends it")
            finally:
                interrupt()
        interrupt()
    assert signal.getsignal(signal.SIGINT) is before
    assert outcome.interrupted and outcome.notes == ["interrupted: these are the figures so far"]
    assert stderr.getvalue() == ""


def test_none_loses_figures_that_are_complete(stderr):
    with Outcome(StatusLine(stderr)) as outcome:
        with outcome.measuring():
            pass
        interrupt()
    assert not outcome.interrupted and outcome.keys()["notes"] == []


def test_before_the_measurement_it_is_told_that_there_are_no_figures(stderr):
    with pytest.raises(KeyboardInterrupt), Outcome(StatusLine(stderr)):
        interrupt()
    assert stderr.getvalue() == "interrupted: nothing was measured yet\n"


def test_a_process_that_is_stuck_can_be_ended(stderr, monkeypatch):
    codes = []
    monkeypatch.setattr(outcome_module.os, "_exit", codes.append)
    with Outcome(StatusLine(stderr)) as outcome:
        with outcome.measuring():
            pass
        outcome._held_since -= HELD_SECONDS + 1
        interrupt()
    assert codes == [130]


def test_who_ignores_it_is_not_interrupted(stderr):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Outcome(StatusLine(stderr)) as outcome, outcome.measuring():
            interrupt()
    finally:
        signal.signal(signal.SIGINT, before)
    assert not outcome.interrupted
