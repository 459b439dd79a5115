"""Ctrl-C ends a measurement at once, also in the middle of a long native call."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EXIT_CODE = 130


@contextmanager
def ends_at_ctrl_c(before_exit: Callable[[], None]) -> Iterator[None]:
    """While it is open, SIGINT ends the process with 130 after ``before_exit``. Main thread only.

    Python's own handler would wait for the native call to return. Nothing needs to be cleaned up:
    the only file has no name any more. A SIGINT that the parent had ignored stays ignored.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch() -> None:
        while numbers := os.read(reader, 16):  # signal numbers as they come; empty: closed
            if signal.SIGINT in numbers:
                before_exit()
                os._exit(EXIT_CODE)
        os.close(reader)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        os.close(writer)
