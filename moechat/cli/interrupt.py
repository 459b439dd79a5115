"""Ctrl-C outside the chat: the first ends the work in order, the third ends the process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_CODE = 130
# Not 2: `timeout -s INT` sends the signal twice, and an impatient second one should not cost what
# the first made the program say.
_ENDING_SIGNAL = 3


class Interrupt:
    """While it is entered, SIGINT is handled here. Main thread only.

    A signal inside ``cancels`` calls the given function, so that whoever iterates over the answer
    sees its regular end; anywhere else it raises KeyboardInterrupt. That is once: the second signal
    does nothing, so that what the first began comes to its end, and the third ends the process.
    With ``whole_process`` it counts those of the ones inside it as well, which thus have been heard
    when they are left.
    """

    def __init__(self, whole_process: bool = False) -> None:
        self._num_signals, self._whole_process = 0, whole_process
        self._cancel: Callable[[], None] | None = None

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self._num_signals > 0

    def __enter__(self) -> Interrupt:
        self._before = signal.getsignal(signal.SIGINT)
        # Ignored by whoever started us (nohup, a script's background job): so be it.
        if self._before != signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        outer = getattr(self._before, "__self__", None)
        if isinstance(outer, Interrupt) and outer._whole_process:
            outer._num_signals += self._num_signals
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
        self._num_signals += 1
        if self._num_signals >= _ENDING_SIGNAL:
            os._exit(EXIT_CODE)
        if self._num_signals > 1:
            return
        if self._cancel is None:
            raise KeyboardInterrupt
        # A handler may run while this very thread holds a lock that cancel() needs.
        threading.Thread(target=self._cancel, daemon=True).start()
