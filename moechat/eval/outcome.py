"""How a measurement went, and what Ctrl-C does to it.

The first Ctrl-C ends what is measured. From then on, and from the end of a measurement on, further
ones are held back, so that the figures are printed: `timeout -s INT` alone sends two.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from moechat.bench.status_line import StatusLine

EXIT_INTERRUPTED = 130
HELD_SECONDS = 5.0  # after that Ctrl-C ends a process that is stuck
_NOT_ENDED = "interrupted: these are the figures so far"
_NOTHING_YET = "interrupted: nothing was measured yet"
_WIDE = 1000  # columns: a line is cut to those of the terminal


class Outcome:
    """Of one measurement, for its report. Handles SIGINT while it is entered; main thread only."""

    def __init__(self, line: StatusLine) -> None:
        self.interrupted = False
        self.seconds = 0.0
        self.notes: list[str] = []
        self._line = line
        self._held_since: float | None = None

    def __enter__(self) -> Outcome:
        self._before = signal.getsignal(signal.SIGINT)
        # Ignored by whoever started us (nohup, a script's background job): so be it.
        if self._before != signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if self._before != signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._before)
        if kind is KeyboardInterrupt:
            self.blank_line()
            self._line.say(_NOTHING_YET)

    def _handle(self, signal_number: int, frame: FrameType | None) -> None:
        if self._held_since is None:
            self._held_since = time.monotonic()
            raise KeyboardInterrupt
        if time.monotonic() - self._held_since > HELD_SECONDS:
            os._exit(EXIT_INTERRUPTED)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Time what is inside; Ctrl-C ends it and is remembered, later ones are held back."""
        began = time.monotonic()
        try:
            yield
        except KeyboardInterrupt:
            self.interrupted = True
            self.notes.insert(0, _NOT_ENDED)
            self.blank_line()
        # Output is next: as if the first one had come.
        self._held_since = time.monotonic()
        self.seconds = self._held_since - began

    def blank_line(self) -> None:
        """Also of the ^C that the terminal wrote behind it, or on the empty line."""
        self._line.show(" " * _WIDE)
        self._line.erase()

    def keys(self) -> dict[str, Any]:
        """What every report ends with."""
        return {
            "interrupted": self.interrupted,
            "seconds": round(self.seconds, 3),
            "notes": self.notes,
        }
