"""One talk: a timeline of token ids, its KV cache, and the requests that extend them.

A session serves one request at a time. Its timeline is changed by the thread that uses the session,
its cache by the decode thread alone.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moechat.decode.worker import Attach, Call, Truncate
from moechat.engine.requests import (
    Cancellation,
    ExtendRequest,
    GenerateRequest,
    Handle,
    LogitsWanted,
    as_moechat_error,
)
from moechat.engine.snapshot import KVSnapshot
from moechat.errors import EngineClosed, PromptEmpty, PromptTooLong, SessionBusy
from moechat.events import TurnStats
from moechat.kv.cache import KVCache
from moechat.kv.timeline import Timeline
from moechat.sample.params import SamplingParams

if TYPE_CHECKING:
    from moechat.engine.engine import Engine

POLL_SECONDS = 0.05  # how long a wait lasts before signals and a closed engine are looked at


class Session:
    """A token timeline with its KV cache. Made by ``Engine.session()``."""

    def __init__(self, engine: Engine, number: int) -> None:
        self._engine = engine
        self.timeline = Timeline(engine.spec.vocab_size)
        self.cache = KVCache(number, engine.spec, engine.compute, speculate=engine.speculate)
        self.drafter = engine.drafter  # of the answers that begin from now on; None: no speculation
        self.last_stats = TurnStats()  # of the request that ended last, an extend's too
        self._busy = threading.Lock()
        self._cancellation: Cancellation | None = None
        self._closed = False
        engine.decode.channel.send(Attach(self.cache))

    def __len__(self) -> int:
        """Tokens on the timeline."""
        return len(self.timeline)

    def extend(
        self, ids: Sequence[int], logits: LogitsWanted = "all"
    ) -> NDArray[np.float32] | None:
        """Append ids; float32 logits [len(ids), vocab], [1, vocab] for "last", None for None.

        Raises ValueError for ids out of range and PromptTooLong before anything changes. When the
        work fails or is cancelled the timeline is as before.
        """
        result: NDArray[np.float32] | None = self._engine.submit(
            ExtendRequest(self, ids, logits)
        ).result()
        return result

    def generate(self, ids: Sequence[int], params: SamplingParams) -> Handle:
        """Append ids, then sample. The handle yields events; see design, section 4.

        Raises like extend, before anything changes; PromptEmpty when there is no token at all.
        """
        return self._engine.submit(GenerateRequest(self, ids, params))

    def rewind(self, num_tokens: int) -> int:
        """Keep the first ``num_tokens`` tokens; returns how many must be prefilled again."""
        self._lock()
        try:
            self.timeline.rewind(num_tokens)
            self.truncate(num_tokens)
            return max(num_tokens - len(self.cache), 0)  # a closed engine truncates nothing
        finally:
            self._busy.release()

    def snapshot(self) -> KVSnapshot:
        """A copy of the talk: token ids and KV. ``Engine.session(snapshot)`` goes on from it.

        Takes as much memory as the cache. Raises SessionBusy while a request is under way.
        """
        self._take()
        try:
            layers = [
                self._on_decode(functools.partial(self.cache.slots, layer))
                for layer in range(self.cache.num_layers + (self.cache.draft is not None))
            ]
            num_layers = self.cache.num_layers
            return KVSnapshot(
                model=self._engine.fingerprint,
                compute=self._engine.compute,
                layout=self.cache.layout,
                windows=self.cache.windows,
                ids=np.array(self.timeline.ids, np.int32),
                marked=self.cache.marked,
                layers=tuple(layers[:num_layers]),
                draft=layers[num_layers] if self.cache.draft is not None else None,
            )
        finally:
            self.end()

    def cancel(self) -> None:
        """Stop the request under way, if there is one; from any thread."""
        cancellation = self._cancellation
        if cancellation is not None:
            cancellation()

    def close(self) -> None:
        """Cancel, and free the KV cache once nothing works on it. The session is then of no use."""
        self._closed = True
        self.cancel()
        if self._busy.acquire(blocking=False):  # otherwise the request under way frees it
            self.end()

    @property
    def engine(self) -> Engine:
        """The engine that made this session."""
        return self._engine

    # The rest is for engine.flow, but for restore(), which is for Engine.session().

    def restore(self, snapshot: KVSnapshot) -> None:
        """Have this session, which is new, go on where the snapshot was taken."""
        steps = self.cache.restore(snapshot.layers, snapshot.draft, snapshot.marked)
        while self._on_decode(lambda: next(steps, steps)) is None:
            pass
        self.timeline.extend(snapshot.ids.tolist())

    def begin(self, request: ExtendRequest | GenerateRequest) -> Handle:
        """Check a request and take the session for it; undone by ``end()``."""
        self._take()
        try:
            self.timeline.check(request.ids)
            self._check_length(request)
        except BaseException:
            self._busy.release()
            raise
        self._cancellation = Cancellation(self._engine.wake)
        return Handle(self._cancellation)

    def _take(self) -> None:
        self._engine.check_open()
        if self._closed:
            raise EngineClosed("the session is closed")
        self._lock()

    def _lock(self) -> None:
        if not self._busy.acquire(blocking=False):
            raise SessionBusy("the session is busy", "another request is under way", "Wait for it")

    def _on_decode(self, action: Callable[[], Any]) -> Any:
        """What ``action()`` gives on the decode thread, which steps all sessions in between."""
        inbox: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
        self._engine.decode.channel.send(Call(action, lambda *outcome: inbox.put(outcome)))
        result, error = inbox.get()
        if error is not None:
            raise as_moechat_error(error)
        return result

    def _check_length(self, request: ExtendRequest | GenerateRequest) -> None:
        total, limit = len(self.timeline) + len(request.ids), self._engine.context_tokens
        if total > limit:
            raise PromptTooLong(f"the prompt has {total} tokens; the limit is {limit}")
        if isinstance(request, GenerateRequest) and total == limit:
            raise PromptTooLong(
                f"the prompt fills the context of {limit} tokens", "an answer needs room"
            )
        if total == 0 and isinstance(request, GenerateRequest):
            raise PromptEmpty("there is nothing to continue", "the timeline is empty")

    def end(self) -> None:
        """The request is over: the cache must not lead the timeline."""
        try:
            self.truncate(0 if self._closed else len(self.timeline))
        finally:
            self._cancellation = None
            self._busy.release()

    def truncate(self, position: int) -> None:
        """Have the decode thread drop slots from ``position`` on; waits until it did.

        After Engine.close() nobody will read the cache again, and nothing is done.
        """
        if self._engine.closed:
            return
        if not self.cache.reaches(position):
            return
        done = threading.Event()
        self._engine.decode.channel.send(Truncate(self.cache, position, done.set))
        done.wait()
