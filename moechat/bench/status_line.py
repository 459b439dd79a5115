"""One line on stderr that tells what a measurement is doing."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TextIO

from moechat.sizes import size_text
from moechat.terminal_size import fold_words, terminal_size

_REFRESH_SECONDS = 0.1
_TICK_SECONDS = 1.0
_PLAIN_SECONDS = 20.0  # from one line to the next where stderr is no terminal

Show = Callable[[str], None]  # puts a line in place of what is shown


class StatusLine:
    """A line that is rewritten in place, without escape codes; to pipes and files it goes now and
    then, each time as a line of its own."""

    def __init__(self, stderr: TextIO) -> None:
        self._stderr = stderr
        self._is_terminal = stderr.isatty()
        self._line = self._shown = ""
        self._since = self._written_at = time.monotonic()
        self._lock, self._ended = threading.Lock(), threading.Event()

    def __enter__(self) -> StatusLine:
        threading.Thread(target=self._tick, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.erase()

    def _tick(self) -> None:
        """A line that stays the same gets the seconds it has stood, so that nothing seems stuck."""
        while not self._ended.wait(_TICK_SECONDS):
            with self._lock:
                now = time.monotonic()
                seconds = int(now - self._since)
                if not self._line.strip() or self._ended.is_set():
                    continue
                line = f"{self._line} ({seconds} s)" if seconds else self._line
                if not self._is_terminal:
                    if now - self._written_at >= _PLAIN_SECONDS:
                        self._written_at = now
                        self._write(line + "\n")
                elif seconds:
                    self._draw(line)

    def show(self, line: str) -> None:
        """Put ``line`` in place of what is shown; an empty one leaves the line blank."""
        with self._lock:
            if line != self._line:
                self._line, self._since = line, time.monotonic()
                if self._is_terminal:
                    self._draw(line)

    def _draw(self, line: str) -> None:
        # A line that wraps could not be erased.
        line = line[: max(terminal_size(self._stderr)[0] - 1, 1)]
        self._write("\r" + line.ljust(len(self._shown)) + ("" if line else "\r"))
        self._shown = line

    def say(self, line: str) -> None:
        """A line that stays, also where stderr is no terminal."""
        self.erase()
        self._write(fold_words(line, self._stderr) + "\n")

    def _write(self, text: str) -> None:
        # A terminal that was closed must not keep the program from cleaning up.
        with contextlib.suppress(OSError):
            self._stderr.write(text)
            self._stderr.flush()

    def erase(self) -> None:
        """Leave the line blank and the cursor at its start."""
        self.show("")


def written_bytes(show: Show, what: str) -> Callable[[int, int], None]:
    """A function of bytes done and bytes in all, which shows them now and then."""
    shown_at = 0.0

    def progress(done_bytes: int, num_bytes: int) -> None:
        nonlocal shown_at
        now = time.monotonic()
        if now - shown_at >= _REFRESH_SECONDS or done_bytes == num_bytes:
            shown_at = now
            show(f"{what}: {size_text(done_bytes)} of {size_text(num_bytes)}")

    return progress
