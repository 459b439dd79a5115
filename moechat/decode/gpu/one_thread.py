"""A thread that does one thing after another and ends with the interpreter, if not before.

An executor's threads are told to end before the interpreter waits for other threads: answers that
those still read would fail.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class OneThread:
    """Used by one thread, which begins it with its first task."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._tasks = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def submit(self, action: Callable[[], Any]) -> Future[Any]:
        """Have it done after all that was submitted before. RuntimeError after close()."""
        if not self._thread.is_alive():
            self._thread.start()
        future: Future[Any] = Future()
        self._tasks.put((action, future))
        return future

    def close(self) -> None:
        """Wait until all is done, and end the thread."""
        if self._thread.is_alive():
            self._tasks.put(None)
            self._thread.join()

    def _run(self) -> None:
        while task := self._tasks.get():
            action, future = task
            try:
                future.set_result(action())
            except BaseException as error:  # told to whoever asks the future
                future.set_exception(error)
            del task, action, future  # what they hold is not to live until the next one comes
