"""Worker processes for pieces of work that do not depend on each other.

Processes, since threads that call numpy often spend their time on the interpreter lock. They are
forked, so they know all that was made before; what they write they write themselves, and only
small results come back. A worker ends when its pipe closes, also when this process was killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Generic, TypeVar

from moechat.errors import MoechatError

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")
_POLL_SECONDS = 0.1  # how late a wish to stop may be noticed


class Workers(Generic[_Task, _Result]):
    """``count`` processes that apply ``function`` to tasks. Use it as a context manager."""

    def __init__(self, count: int, function: Callable[[_Task], _Result]) -> None:
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes = []
        # Ctrl-C reaches all processes, and the first decides: no moment when a worker heeds it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            for _ in range(count):
                ours, theirs = context.Pipe()
                self._pipes.append(ours)
                # It inherits our ends of all pipes so far, and must not keep any of them open.
                process = context.Process(
                    target=_serve, args=(function, theirs, list(self._pipes)), daemon=True
                )
                process.start()
                theirs.close()
                self._processes.append(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def __enter__(self) -> Workers[_Task, _Result]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join()

    def run(
        self, tasks: Iterable[_Task], stopped: Callable[[], bool]
    ) -> Iterator[tuple[_Task, _Result]]:
        """Tasks with their results as they come; ends early, with all that was begun, if stopped.

        Raises what the function raised, MoechatError when a worker died.
        """
        waiting = iter(tasks)
        idle = list(self._pipes)
        under_way: dict[Connection, _Task] = {}
        while True:
            while idle and not stopped():
                task = next(waiting, None)
                if task is None:
                    break
                under_way[idle[-1]] = task
                _send(idle.pop(), task)
            if not under_way:
                return
            for pipe in wait(list(under_way), timeout=_POLL_SECONDS):
                assert isinstance(pipe, Connection)
                result: Any = _receive(pipe)
                idle.append(pipe)
                yield under_way.pop(pipe), result


def _send(pipe: Connection, task: object) -> None:
    try:
        pipe.send(task)
    except OSError:
        raise _died() from None


def _receive(pipe: Connection) -> Any:
    try:
        succeeded, result = pipe.recv()
    except (EOFError, OSError):
        raise _died() from None
    if not succeeded:
        raise result
    return result


def _died() -> MoechatError:
    return MoechatError(
        "a worker process ended",
        "it was killed, perhaps for want of memory",
        "The same command goes on where this one stopped",
    )


def _serve(
    function: Callable[[object], object], pipe: Connection, others: list[Connection]
) -> None:
    """What a worker does until its pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for other in others:
        other.close()
    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        try:
            answer = (True, function(task))
        except Exception as error:
            answer = (False, error)
        try:
            pipe.send(answer)
        except OSError:
            os._exit(0)
