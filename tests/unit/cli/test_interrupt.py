"""Ctrl-C: cancel, raise, or leave ignored; tested with real signals."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from moechat.cli.interrupt import Interrupt


def press():
    os.kill(os.getpid(), signal.SIGINT)


def test_inside_an_answer_it_cancels_and_elsewhere_it_raises():
    cancelled = threading.Event()
    with Interrupt() as interrupt:
        with interrupt.cancels(cancelled.set):
            press()
            assert cancelled.wait(5)
        assert interrupt.requested
    with Interrupt(), pytest.raises(KeyboardInterrupt):
        press()


def test_handler_is_put_back():
    before = signal.getsignal(signal.SIGINT)
    with Interrupt():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


def test_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupt() as interrupt:
            press()
        assert not interrupt.requested
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("num_signals", "ends"), [(2, False), (3, True)])
def test_the_second_one_does_nothing_and_the_third_ends_the_process(num_signals, ends):
    script = f"""
import os, signal
from moechat.cli.interrupt import Interrupt
with Interrupt() as interrupt, interrupt.cancels(lambda: None):
    for _ in range({num_signals}):
        os.kill(os.getpid(), signal.SIGINT)
    print("still here")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, timeout=20, check=False
    )
    assert (done.returncode, done.stdout) == ((130, b"") if ends else (0, b"still here\n"))


def test_the_second_one_does_not_disturb_what_the_first_began():
    with Interrupt() as interrupt:
        with pytest.raises(KeyboardInterrupt):
            press()
        press()
        assert interrupt.requested


def test_one_of_the_whole_process_has_heard_those_inside():
    with Interrupt(whole_process=True) as process:
        with pytest.raises(KeyboardInterrupt), Interrupt():
            press()
        press()
        assert process.requested
        with pytest.raises(KeyboardInterrupt), Interrupt():
            press()


def test_one_inside_another_leaves_it_untouched():
    with Interrupt() as outer:
        with pytest.raises(KeyboardInterrupt), Interrupt():
            press()
        assert not outer.requested
