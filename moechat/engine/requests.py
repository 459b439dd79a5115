"""What a session can be asked to do, and the handle on which a caller waits."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from moechat import _native
from moechat.errors import from_native
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


class Handle:
    """A request under way. Iterate for events, or wait for ``result()``.

    Whoever holds the handle must see it to its end: iterate, call result() or close().
    """

    def __init__(self, cancel: _native.CancelFlag, wake: Callable[[], None]) -> None:
        self.cancel_flag, self._wake = cancel, wake
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()  # filled by the worker threads
        self._events: Iterator[Event] = iter(())
        self._result: Any = None

    def start(self, events: Iterator[Event]) -> None:
        """Set what iteration yields (the session's business)."""
        self._events = events

    def cancel(self) -> None:
        """Stop as soon as possible; safe from any thread and from signal handlers."""
        self.cancel_flag.raise_()
        self._wake()

    def finish(self, result: Any) -> None:
        """Set what result() returns."""
        self._result = result

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        return next(self._events)

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


def as_moechat_error(error: Exception) -> Exception:
    """Native errors under their stable names; everything else as it is."""
    if isinstance(error, _native.NativeError):
        return from_native(*error.args)
    return error
