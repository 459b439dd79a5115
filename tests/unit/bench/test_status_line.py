"""The line on stderr: it ticks while it stands, and a closed terminal does not matter."""

from __future__ import annotations

import io
import time

from moechat.bench import status_line
from moechat.bench.amounts import figure
from moechat.bench.status_line import StatusLine
from moechat.sizes import size_text


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Closed(Terminal):
    def write(self, text):
        raise OSError(5, "Input/output error")


def test_a_line_that_stands_shows_its_seconds(monkeypatch):
    monkeypatch.setattr(status_line, "_TICK_SECONDS", 0.05)
    stderr = Terminal()
    with StatusLine(stderr) as line:
        line.show("decode")
        deadline = time.monotonic() + 10
        while "decode (1 s)" not in stderr.getvalue():
            assert time.monotonic() < deadline
            time.sleep(0.02)
    shown = stderr.getvalue()
    assert shown.endswith("\r") and shown.split("\r")[-2].strip() == ""


def test_pipes_get_what_is_said_and_nothing_else():
    stderr = io.StringIO()
    with StatusLine(stderr) as line:
        line.show("decode")
        line.say("this stays")
    assert stderr.getvalue() == "this stays\n"


def test_pipes_hear_now_and_then_how_far_it_is(monkeypatch):
    monkeypatch.setattr(status_line, "_TICK_SECONDS", 0.01)
    monkeypatch.setattr(status_line, "_PLAIN_SECONDS", 0.2)
    stderr = io.StringIO()
    with StatusLine(stderr) as line:
        began = time.monotonic()
        number = 0
        while stderr.getvalue().count("\n") < 3:
            number += 1
            line.show(f"step {number}")
            assert time.monotonic() < began + 10
            time.sleep(0.001)
        passed = time.monotonic() - began
    assert passed >= 3 * 0.2 and all(
        shown.startswith("step ") for shown in stderr.getvalue().splitlines()
    )


def test_pipes_hear_of_a_line_that_stands_and_of_no_blank_one(monkeypatch):
    monkeypatch.setattr(status_line, "_TICK_SECONDS", 0.02)
    monkeypatch.setattr(status_line, "_PLAIN_SECONDS", 0.1)
    stderr = io.StringIO()
    with StatusLine(stderr) as line:
        line.show("   ")
        time.sleep(0.25)
        assert stderr.getvalue() == ""
        line.show("decode")
        began = time.monotonic()
        while "decode (1 s)\n" not in stderr.getvalue():
            assert time.monotonic() < began + 10
            time.sleep(0.02)


def test_a_closed_terminal_is_survived():
    with StatusLine(Closed()) as line:
        line.show("decode")
        line.say("more")


def test_amounts_have_no_exponents_and_sizes_fit():
    assert [figure(value) for value in (6284.2, 0.0000123, 0.0, 30.44, 1.0)] == (
        ["6284", "0.0000123", "0", "30.4", "1"]
    )
    assert (size_text(2.5e9), size_text(14.25e6)) == ("2.5 GB", "14.2 MB")
