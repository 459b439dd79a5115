"""SIGTERM and SIGHUP unwind the program like Ctrl-C, so that what was written is removed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def unwinds_when_ended() -> Iterator[None]:
    """While it is open, these signals raise SystemExit with 128 and their number.

    Only the first one counts: cleaning up is not to be broken off. One that the parent had ignored
    (nohup) stays ignored. In other threads than the main one nothing is changed.
    """
    previous = {}

    def end(number: int, frame: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        for each in _SIGNALS:
            if signal.getsignal(each) == signal.SIG_DFL:
                previous[each] = signal.signal(each, end)
    try:
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)
