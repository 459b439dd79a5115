"""What a signal raised where Python can only ignore it is raised once more.

A handler may run inside ``__del__``, or in a callback of the garbage collector, at any time. What
it raises there is printed and forgotten: one Ctrl-C, or one SIGTERM, would go lost.
"""

from __future__ import annotations

import _thread
import sys
import threading
import time
from typing import Any

_MOMENT_SECONDS = 0.002


def keep_lost_signals() -> None:
    """KeyboardInterrupt and SystemExit that would be ignored reach the main thread after all."""
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        error = unraisable.exc_value
        main = threading.main_thread()
        if isinstance(error, KeyboardInterrupt | SystemExit) and main.ident is not None:
            _thread.start_new_thread(_raise_in, (main.ident, error))
        else:
            before(unraisable)

    sys.unraisablehook = hook


def _raise_in(thread_ident: int, error: BaseException) -> None:
    """A moment later: at once would be inside the hook, where it would be ignored again."""
    import ctypes  # no start waits for it

    time.sleep(_MOMENT_SECONDS)
    kind = type(error)
    if isinstance(error, SystemExit):  # only a class can be raised in this way
        kind = type("SystemExit", (SystemExit,), {"code": error.code})
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_ident), ctypes.py_object(kind))
