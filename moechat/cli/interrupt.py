"""Ctrl-C outside the chat: the first ends the answer in order, the second ends the process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_CODE = 130


class Interrupt:
    """While it is entered, SIGINT is handled here. Main thread only.

    A signal inside ``cancels`` calls the given function, so that whoever iterates over the answer
    sees its regular end; anywhere else it raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.requested = False
        self._cancel: Callable[[], None] | None = None

    def __enter__(self) -> Interrupt:
        self._before = signal.getsignal(signal.SIGINT)
        # Ignored by whoever started us (nohup, a script's background job): so be it.
        if self._before != signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before != signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._before)

    @contextmanager
    def cancels(self, cancel: Callable[[], None]) -> Iterator[None]:
        """While it is open, Ctrl-C calls ``cancel`` once, in a thread of its own."""
        self._cancel = cancel
        try:
            yield
        finally:
            self._cancel = None

    def _handle(self, signal_number: int, frame: FrameType | None) -> None:
        if self.requested:
            os._exit(EXIT_CODE)
        self.requested = True
        if self._cancel is None:
            raise KeyboardInterrupt
        # A handler may run while this very thread holds a lock that cancel() needs.
        threading.Thread(target=self._cancel, daemon=True).start()
