"""Signals that arrive where Python ignores what their handlers raise."""

from __future__ import annotations

import subprocess
import sys

import pytest

# In a process of its own: the test runner takes the hook for itself.
PRELUDE = """
import gc, signal, sys, time
from moechat.lost_signals import keep_lost_signals
keep_lost_signals()
class SignalsWhenDeleted:
    def __init__(self, number):
        self.number, self.itself = number, self
    def __del__(self):
        signal.raise_signal(self.number)
def ending(number, frame):
    raise SystemExit(128 + number)
signal.signal(signal.SIGTERM, ending)
def callback(phase, info):
    gc.callbacks.remove(callback)
    signal.raise_signal(signal.SIGINT)
try:
"""
POSTLUDE = """
    for _ in range(2000):
        time.sleep(0.001)
except KeyboardInterrupt:
    sys.exit(7)
"""


def run(line):
    done = subprocess.run(
        [sys.executable, "-c", f"{PRELUDE}    {line}{POSTLUDE}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("line", "exit_code"),
    [
        ("SignalsWhenDeleted(signal.SIGINT).itself = None", 7),
        ("SignalsWhenDeleted(signal.SIGINT); gc.collect()", 7),
        ("SignalsWhenDeleted(signal.SIGTERM); gc.collect()", 143),
        ("gc.callbacks.append(callback); gc.collect()", 7),
    ],
)
def test_what_a_signal_raises_arrives(line, exit_code):
    assert run(line) == (exit_code, "")


def test_other_ignored_errors_are_told_as_before():
    code, stderr = run("type('Broken', (), {'__del__': lambda self: 1 / 0})()")
    assert code == 0
    assert "ZeroDivisionError" in stderr
