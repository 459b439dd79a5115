"""Signals while the chat works: Ctrl-C cancels the answer, a second one ends the process."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

EXIT_INTERRUPTED = 130
SECOND_WITHIN_SECONDS = 1.0
# The editor switches this off when it returns; a paste during an answer is still one paste.
_BRACKETED_PASTE_ON, _BRACKETED_PASTE_OFF = "\x1b[?2004h", "\x1b[?2004l"
# What a killed editor or a half-written answer may leave: a hidden cursor, a style.
_PLAIN_CURSOR = "\x1b[?25h\x1b[0m"
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Interrupts:
    """Owns signals and the terminal's modes while it is entered. Main thread only.

    Inside ``turn`` SIGINT cancels; elsewhere it raises KeyboardInterrupt. Signals that end the
    process do so after the terminal is as it was.
    """

    def __init__(self) -> None:
        self.cancelled = False  # whether the turn under way was asked to stop
        self._cancel: Callable[[], None] | None = None
        self._last_seconds = float("-inf")
        self._terminal = _Terminal()

    def __enter__(self) -> Interrupts:
        self._before = {signal.SIGINT: signal.signal(signal.SIGINT, self._handle)}
        for number in _ENDING_SIGNALS:
            if signal.getsignal(number) == signal.SIG_DFL:  # else: ignored, as nohup does
                self._before[number] = signal.signal(number, self._end)
        self._terminal.silence()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._terminal.restore()

    @contextmanager
    def turn(self, cancel: Callable[[], None]) -> Iterator[None]:
        """While it is open, Ctrl-C calls ``cancel``."""
        self.cancelled, self._cancel = False, cancel
        self._terminal.expect_paste()
        try:
            yield
        finally:
            self._cancel = None

    def is_second(self) -> bool:
        """Note a Ctrl-C at this moment; whether the one before is less than a second old."""
        before, self._last_seconds = self._last_seconds, time.monotonic()
        return self._last_seconds - before < SECOND_WITHIN_SECONDS

    def _handle(self, signal_number: int, frame: FrameType | None) -> None:
        if self._cancel is None:
            raise KeyboardInterrupt
        if self.is_second() and self.cancelled:
            self._terminal.restore(at_once=True)
            os._exit(EXIT_INTERRUPTED)
        self.cancelled = True
        # A handler may run while this very thread holds a lock that cancel() needs.
        threading.Thread(target=self._cancel, daemon=True).start()

    def _end(self, signal_number: int, frame: FrameType | None) -> None:
        self._terminal.restore(at_once=True)
        signal.signal(signal_number, signal.SIG_DFL)
        os.kill(os.getpid(), signal_number)


class _Terminal:
    """The modes of the terminal on stdin; does nothing where there is none."""

    def __init__(self) -> None:
        self._modes: list[Any] | None = None
        self._output: int | None = None
        try:
            self._input = sys.stdin.fileno()
            self._modes = termios.tcgetattr(self._input)
            if os.environ.get("TERM", "dumb") not in ("dumb", "unknown") and sys.stdout.isatty():
                self._output = sys.stdout.fileno()
        except (OSError, ValueError, termios.error):
            pass

    def silence(self) -> None:
        """What is typed outside the editor is not shown, and waits for it as it was typed."""
        if self._modes is None:
            return
        modes = termios.tcgetattr(self._input)
        modes[0] &= ~(termios.ICRNL | termios.INLCR)
        modes[3] &= ~(termios.ECHO | termios.ICANON)
        modes[6][termios.VSUSP] = b"\0"  # a shell would inherit these modes
        termios.tcsetattr(self._input, termios.TCSADRAIN, modes)

    def expect_paste(self) -> None:
        """Have a paste marked as one also while no editor runs."""
        self._emit(_BRACKETED_PASTE_ON)

    def restore(self, at_once: bool = False) -> None:
        """Leave the terminal as it was found; ``at_once`` even if it takes no more output."""
        if self._modes is not None:
            when = termios.TCSANOW if at_once else termios.TCSADRAIN
            with contextlib.suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(self._input, when, self._modes)
        if at_once and self._output is not None and not select.select([], [self._output], [], 0)[1]:
            return
        with contextlib.suppress(OSError):
            self._emit(_PLAIN_CURSOR + ("\r\n" if at_once else "") + _BRACKETED_PASTE_OFF)

    def _emit(self, code: str) -> None:
        if self._output is not None:
            os.write(self._output, code.encode())
