"""The size of a terminal."""

from __future__ import annotations

import fcntl
import io
import os
import struct
import termios

from moechat.terminal.size import terminal_size


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
