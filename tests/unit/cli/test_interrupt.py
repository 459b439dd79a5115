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


def test_second_one_ends_the_process_at_once():
    script = """
import os, signal
from moechat.cli.interrupt import Interrupt
with Interrupt() as interrupt, interrupt.cancels(lambda: None):
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    print("still here")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, timeout=20, check=False
    )
    assert (done.returncode, done.stdout) == (130, b"")
