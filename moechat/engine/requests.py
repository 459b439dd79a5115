"""What a session can be asked to do, and the handle on which a caller waits."""

from __future__ import annotations

import _thread
import contextlib
import gc
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from moechat import _native
from moechat.errors import DoesNotFit, from_native
from moechat.events import Event
from moechat.sample.params import SamplingParams

if TYPE_CHECKING:
    from moechat.engine.session import Session

LogitsWanted = Literal["all", "last"] | None


@dataclass(frozen=True)
class ExtendRequest:
    """Append ids to a session's timeline; logits of all of them, the last, or none."""

    session: Session
    ids: Sequence[int]
    logits: LogitsWanted = "all"


@dataclass(frozen=True)
class GenerateRequest:
    """Append ids (may be empty), then sample tokens until the answer ends."""

    session: Session
    ids: Sequence[int]
    params: SamplingParams


@dataclass(frozen=True)
class Failed:
    """A stage broke (``error``) or was cancelled (None)."""

    error: Exception | None


class Cancellation:
    """The wish to stop one request; safe from any thread and from signal handlers."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.flag = _native.CancelFlag()
        self._wake = wake  # makes a sender that waits for room look at the flag

    def __call__(self) -> None:
        """Ask the request to stop as soon as possible."""
        self.flag.raise_()
        self._wake()


_Events = Generator[Event, None, Any]

# Of all handles that live. The collector, which may run on any thread, never meets one: to end a
# generator is to wait for the worker threads, and maybe it is one of them, or holds a lock of them.
_under_way: set[_Events] = set()
_collector = threading.local()


def _note_collector(phase: str, _info: dict[str, int]) -> None:
    _collector.runs = phase == "start"


gc.callbacks.append(_note_collector)


class Handle:
    """A request under way. Iterate for events, or wait for ``result()``.

    A handle that is dropped, read to the end or not, cancels its request and frees the session.
    Nothing that the worker threads hold refers to it.
    """

    def __init__(self, cancellation: Cancellation) -> None:
        self.cancellation = cancellation
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()  # filled by the worker threads
        self._events: _Events | None = None
        self._result: Any = None

    def start(self, events: _Events) -> None:
        """Set what iteration yields; its return value is the result."""
        _under_way.add(events)
        self._events = events

    def cancel(self) -> None:
        """Stop as soon as possible; safe from any thread and from signal handlers."""
        self.cancellation()

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        if self._events is None:
            raise StopIteration
        try:
            return next(self._events)
        except StopIteration as stop:
            self._result = self._result if stop.value is None else stop.value
            raise

    def result(self) -> Any:
        """Run to the end: logits or None of an extend, the Finished event of a generate."""
        for _ in self:
            pass
        return self._result

    def close(self) -> None:
        """Cancel and clean up, discarding events."""
        if not self._handed_over():
            self.cancel()
            for _ in self:
                pass

    def __del__(self) -> None:
        if self._events is not None and not self._handed_over():
            _abandon(self.cancellation, self._events)

    def _handed_over(self) -> bool:
        """Whether the collector calls, which cannot wait: then a thread of its own cleans up."""
        if self._events is None or not getattr(_collector, "runs", False):
            return False
        with contextlib.suppress(RuntimeError):  # the interpreter ends
            _thread.start_new_thread(_abandon, (self.cancellation, self._events))
        return True


def _abandon(cancellation: Cancellation, events: _Events) -> None:
    """Cancel a request whose handle is gone, and discard its events."""
    try:
        with contextlib.suppress(Exception):
            cancellation()
            for _ in events:
                pass
    finally:
        _under_way.discard(events)


def as_moechat_error(error: Exception) -> Exception:
    """Native errors under their stable names; everything else as it is."""
    if isinstance(error, _native.NativeError):
        return from_native(*error.args)
    if isinstance(error, MemoryError):
        return DoesNotFit("there is not enough memory for this", "", "Ask for a shorter context")
    return error
