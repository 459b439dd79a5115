"""The size of a terminal."""

from __future__ import annotations

import fcntl
import io
import os
import struct
import termios

from moechat.terminal_size import fold_words, terminal_size


def test_the_terminal_is_asked_before_the_environment(monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    monkeypatch.setenv("LINES", "400")
    controller, terminal = os.openpty()
    with os.fdopen(terminal, "w") as stream:
        assert terminal_size(stream) == (500, 400)  # a new terminal says 0 x 0
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 60, 0, 0))
        assert terminal_size(stream) == (60, 20)
    os.close(controller)
    assert terminal_size(io.StringIO()) == (500, 400)


def test_lines_for_a_terminal_break_between_words_only():
    controller, terminal = os.openpty()
    with os.fdopen(terminal, "w") as stream:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 30, 0, 0))
        path = "/a/folder-with/a-name/that-is-wider/than-that"
        folded = fold_words(f"there is no folder {path}: look again, please", stream)
        assert folded == f"there is no folder\n{path}:\nlook again, please"
    os.close(controller)
    assert fold_words("x " * 100, io.StringIO()) == "x " * 100
