"""What a session can be asked to do, and the handle on which a caller waits."""

from __future__ import annotations

import contextlib
import queue
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


class Handle:
    """A request under way. Iterate for events, or wait for ``result()``.

    A handle that is dropped, read to the end or not, cancels its request and frees the session.
    Nothing that the worker threads hold refers to it.
    """

    def __init__(self, cancellation: Cancellation) -> None:
        self.cancellation = cancellation
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()  # filled by the worker threads
        self._events: Generator[Event, None, Any] | None = None
        self._result: Any = None

    def start(self, events: Generator[Event, None, Any]) -> None:
        """Set what iteration yields; its return value is the result."""
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
        self.cancel()
        for _ in self:
            pass

    def __del__(self) -> None:
        if self._events is not None:
            with contextlib.suppress(Exception):
                self.close()


def as_moechat_error(error: Exception) -> Exception:
    """Native errors under their stable names; everything else as it is."""
    if isinstance(error, _native.NativeError):
        return from_native(*error.args)
    if isinstance(error, MemoryError):
        return DoesNotFit("there is not enough memory for this", "", "Ask for a shorter context")
    return error
