"""The flow of one request, in order: prompt ids → prefill → KV packets → decode → tokens → text.

Both kinds of request begin alike. All pending tokens but the last are prefilled; their KV reaches
the cache as packets; the last one goes through a decode step, whose logits start the answer.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from moechat import _native
from moechat.decode.worker import Control, DecodeStart, StepLast, Truncate
from moechat.engine.answer import Answer
from moechat.engine.requests import (
    ExtendRequest,
    Failed,
    GenerateRequest,
    Handle,
    as_moechat_error,
)
from moechat.engine.session import POLL_SECONDS, Session
from moechat.events import Event, Finished, FinishReason, PrefillProgress, Token, TurnStats
from moechat.prefill.worker import PrefillJob, PrefillResult
from moechat.sample.chain import make_sampler

if TYPE_CHECKING:
    from moechat.engine.engine import Engine

Logits = NDArray[np.float32]


def start(engine: Engine, request: ExtendRequest | GenerateRequest) -> Handle:
    """Check a request, take its session and put the work on its way.

    Raises ValueError, PromptTooLong, SessionBusy and the like with the session as it was.
    """
    session = request.session
    before = len(session)
    handle = session.begin(request)
    try:
        session.timeline.extend(request.ids)
        if isinstance(request, ExtendRequest):
            handle.start(_start_extend(engine, handle, request, before))
        else:
            handle.start(_start_generate(engine, handle, request))
    except BaseException:
        session.timeline.rewind(before)
        session.end()
        raise
    return handle


def _start_extend(
    engine: Engine, handle: Handle, request: ExtendRequest, before: int
) -> Iterator[Event]:
    session = request.session

    def step_done(logits: Logits | None, error: Exception | None) -> None:
        handle.inbox.put(Failed(error) if error else (logits,))

    if request.logits == "last" and len(session) > 0:
        session.truncate(len(session) - 1)
    pending = session.timeline.ids[len(session.cache) :]
    if request.logits == "last" and pending:
        step = StepLast(session.cache, pending[-1], step_done)
        _prefill(engine, session, handle, pending[:-1], step)
    else:
        wanted = len(request.ids) if request.logits == "all" else 0
        step = StepLast(session.cache, None, step_done)
        _prefill(engine, session, handle, pending, step, len(pending) - wanted if wanted else None)
    return _extend_events(session, handle, request, before)


def _extend_events(
    session: Session, handle: Handle, request: ExtendRequest, before: int
) -> Iterator[Event]:
    logits: Logits | None = None
    complete = False
    try:
        while not complete:
            item = handle.inbox.get()
            if isinstance(item, PrefillProgress):
                yield item
            elif isinstance(item, PrefillResult):
                logits = item.logits
            elif isinstance(item, Failed):
                if item.error is not None:
                    raise as_moechat_error(item.error)
                break
            else:
                (stepped,) = item
                logits = stepped[None, :] if stepped is not None else logits
                complete = True
    finally:
        if not complete:
            session.timeline.rewind(before)
        session.end()
    if request.logits == "all" and logits is None:
        logits = np.empty((0, session.timeline.vocab_size), np.float32)
    handle.finish(logits if complete and request.logits else None)


def _prefill(
    engine: Engine,
    session: Session,
    handle: Handle,
    ids: list[int],
    then: Control,
    logits_from: int | None = None,
) -> None:
    """Prefill ``ids``, if there are any, and send ``then`` to decode after their KV."""
    if not ids:
        engine.decode.channel.send(then)
        return

    def prefilled(result: PrefillResult) -> Control:
        handle.inbox.put(result)
        return then

    def failed(error: Exception | None) -> Control:
        # The message drops what has arrived so far; only then may the session go on.
        return Truncate(session.cache, first_slot, lambda: handle.inbox.put(Failed(error)))

    first_slot = len(session.cache)
    engine.prefill.submit(
        PrefillJob(
            cache=session.cache,
            ids=ids,
            cancel=handle.cancel_flag,
            progress=handle.inbox.put,
            then=prefilled,
            failed=failed,
            logits_from=logits_from,
        )
    )


def _start_generate(engine: Engine, handle: Handle, request: GenerateRequest) -> Iterator[Event]:
    session = request.session
    submitted_seconds = time.monotonic()
    answer = Answer(engine.text_or_none, request.params.stop)
    session.truncate(len(session) - 1)
    cached = len(session.cache)
    pending = session.timeline.ids[cached:]
    seed = request.params.seed if request.params.seed is not None else secrets.randbits(32)
    queue = _native.TokenQueue()

    def done(reason: str, started_seconds: float, error: Exception | None) -> None:
        handle.inbox.put(Failed(error) if error else (reason, started_seconds))

    start = DecodeStart(
        cache=session.cache,
        sampler=make_sampler(
            request.params, seed, session.timeline.vocab_size, session.timeline.ids
        ),
        queue=queue,
        cancel=handle.cancel_flag,
        token=pending[-1],
        max_tokens=request.params.max_tokens or engine.context_tokens,
        context_tokens=engine.context_tokens,
        end_ids=[] if request.params.ignore_end else list(engine.spec.end_ids),
        done=done,
    )
    stats = TurnStats(new_prompt_tokens=len(pending), cached_prompt_tokens=cached, seed=seed)
    _prefill(engine, session, handle, pending[:-1], start)
    return _generate_events(session, handle, answer, queue, stats, submitted_seconds)


def _generate_events(
    session: Session,
    handle: Handle,
    answer: Answer,
    queue: _native.TokenQueue,
    stats: TurnStats,
    submitted_seconds: float,
) -> Iterator[Event]:
    """Tokens as they come. The timeline takes a token when it is yielded; what decode made beyond
    that (it runs ahead of a slow reader, and of a stop string) is dropped at the end."""
    token_seconds: list[float] = []
    outcome: object = None
    try:
        finished = False
        while not finished:
            while not handle.inbox.empty():
                item = handle.inbox.get()
                if isinstance(item, PrefillProgress):
                    yield item
                elif isinstance(item, PrefillResult):
                    stats = replace(stats, prefill_seconds=item.seconds)
                else:
                    outcome = item
            tokens, finished = queue.pop(POLL_SECONDS)
            finished = finished or isinstance(outcome, Failed)
            for token_id, seconds in tokens:
                if answer.stopped or handle.cancel_flag.raised:
                    break
                session.timeline.extend([token_id])
                token_seconds.append(seconds)
                yield Token(token_id, answer.push(token_id))
                if answer.stopped:
                    handle.cancel()
        while outcome is None or isinstance(outcome, PrefillProgress | PrefillResult):
            outcome = handle.inbox.get()
    finally:
        if outcome is None:  # the reader went away
            handle.cancel()
            while outcome is None or isinstance(outcome, PrefillProgress | PrefillResult):
                outcome = handle.inbox.get()
        session.end()
    reason: FinishReason = "cancelled"
    if isinstance(outcome, Failed):
        if outcome.error is not None:
            raise as_moechat_error(outcome.error)
    else:
        name, started_seconds = cast("tuple[FinishReason, float]", outcome)
        reason = "stop" if answer.stopped else name
        stats = replace(
            stats,
            decode_tokens=len(token_seconds),
            decode_seconds=token_seconds[-1] - started_seconds if token_seconds else 0.0,
            first_token_seconds=token_seconds[0] - submitted_seconds if token_seconds else 0.0,
        )
    end = Finished(reason, answer.flush(), stats)
    handle.finish(end)
    yield end
