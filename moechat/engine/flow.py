"""The flow of one request, in order: prompt ids → prefill → KV packets → decode → tokens → text.

Both kinds of request begin alike. All pending tokens but the last are prefilled; their KV reaches
the cache as packets; the last one goes through a decode step, whose logits start the answer.
"""

from __future__ import annotations

import functools
import queue
import secrets
import time
from collections.abc import Generator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from moechat import _native
from moechat.decode.worker import Call, Control, DecodeEnd, DecodeStart, StepLast, Truncate
from moechat.engine.answer import Answer
from moechat.engine.requests import (
    Cancellation,
    ExtendRequest,
    Failed,
    GenerateRequest,
    Handle,
    LogitsWanted,
    as_moechat_error,
)
from moechat.engine.session import POLL_SECONDS, Session
from moechat.events import (
    Event,
    Finished,
    FinishReason,
    PrefillProgress,
    Queued,
    Token,
    TurnStats,
)
from moechat.prefill.job import PrefillJob, PrefillResult
from moechat.sample.chain import make_sampler

if TYPE_CHECKING:
    from moechat.engine.engine import Engine

# Shorter prompts say little of which experts their answers need.
_LEAST_COUNTED_TOKENS = 32

Logits = NDArray[np.float32]
Inbox = queue.SimpleQueue[Any]


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
        handle.cancel()  # an interrupt may come when the work is on its way already
        session.timeline.rewind(before)
        session.end()
        raise
    return handle


def _start_extend(
    engine: Engine, handle: Handle, request: ExtendRequest, before: int
) -> Generator[Event, None, Logits | None]:
    session, inbox = request.session, handle.inbox

    def step_done(logits: Logits | None, error: Exception | None) -> None:
        inbox.put(Failed(error) if error else (logits,))

    if request.logits == "last" and len(session) > 0:
        session.truncate(len(session) - 1)
    cached = len(session.cache)
    pending = session.timeline.ids[cached:]
    stats = TurnStats(new_prompt_tokens=len(pending), cached_prompt_tokens=cached)
    if request.logits == "last" and pending:
        step = StepLast(session.cache, len(session) - 1, pending[-1], step_done)
        _prefill(engine, session, handle, pending[:-1], step, next_id=pending[-1])
    else:
        wanted = len(request.ids) if request.logits == "all" else 0
        step = StepLast(session.cache, len(session), None, step_done)
        _prefill(engine, session, handle, pending, step, len(pending) - wanted if wanted else None)
    return _extend_events(session, inbox, handle.cancellation, request.logits, before, stats)


def _extend_events(
    session: Session,
    inbox: Inbox,
    cancellation: Cancellation,
    wanted: LogitsWanted,
    before: int,
    stats: TurnStats,
) -> Generator[Event, None, Logits | None]:
    """Progress; returns the logits. A request that fails, is cancelled or abandoned is undone."""
    logits: Logits | None = None
    outcome: Any = None
    complete = False
    decode_seconds = session.cache.decode_seconds
    try:
        while outcome is None:
            item = inbox.get()
            if isinstance(item, PrefillProgress | Queued):
                yield item
            elif isinstance(item, PrefillResult):
                logits, stats = item.logits, _prefilled(stats, item)
            else:
                outcome = item
        complete = not isinstance(outcome, Failed)
    finally:
        if outcome is None:
            _last_word(inbox, cancellation)
        if not complete:
            session.timeline.rewind(before)
        session.last_stats = _arrived(stats, session, decode_seconds)
        session.end()
    if isinstance(outcome, Failed):
        if outcome.error is not None:
            raise as_moechat_error(outcome.error)
        return None
    (stepped,) = outcome
    if stepped is not None:
        logits = stepped[None, :]
    if wanted == "all" and logits is None:
        logits = np.empty((0, session.timeline.vocab_size), np.float32)
    return logits if wanted else None


def _prefilled(stats: TurnStats, result: PrefillResult) -> TurnStats:
    return replace(
        stats,
        prefill_seconds=result.seconds,
        queued_seconds=result.queued_seconds,
        kv_bytes=result.kv_bytes,
        kv_native_bytes=result.kv_native_bytes,
        kv_dropped_fraction=result.kv_dropped_fraction,
        kv_native_layers=result.kv_native_layers,
        kv_encode_seconds=result.kv_encode_seconds,
        prefill_device=result.device,
        prefill_streamed_bytes=result.streamed_bytes,
        prefill_stream_seconds=result.stream_seconds,
        prefill_compute_seconds=result.compute_seconds,
        prefill_wait_seconds=result.wait_seconds,
        prefill_attention=result.attention,
        prefill_resumed_layers=result.resumed_layers,
        prefill_layers=result.num_layers,
        prefill_layers_done=result.layers_done,
    )


def _held_experts(session: Session) -> int:
    device = session.engine.decode.device
    return device.num_held_experts if device is not None and session.drafter is None else 0


def _arrived(stats: TurnStats, session: Session, decode_seconds: float) -> TurnStats:
    """With what decoding of packets took, by the cache's clock since ``decode_seconds``."""
    return replace(stats, kv_decode_seconds=session.cache.decode_seconds - decode_seconds)


def _last_word(inbox: Inbox, cancellation: Cancellation) -> Any:
    """Cancel and wait until the worker threads have let go of the session, whatever interrupts."""
    cancellation()
    while True:
        try:
            item = inbox.get()
        except KeyboardInterrupt:
            continue
        if not isinstance(item, PrefillProgress | PrefillResult | Queued):
            return item


def _prefill(
    engine: Engine,
    session: Session,
    handle: Handle,
    ids: list[int],
    then: Control,
    logits_from: int | None = None,
    next_id: int | None = None,
) -> None:
    """Prefill ``ids``, if there are any, and send ``then`` to decode after their KV.

    ``next_id`` follows them on the timeline.
    """
    if not ids:
        engine.decode.channel.send(then)
        return

    inbox, cached, device = handle.inbox, len(session.cache), engine.decode.device
    counts_experts = device is not None and device.num_gpu_experts > 0
    so_far = PrefillResult()

    def prefilled(result: PrefillResult) -> Control:
        inbox.put(result)
        if device is not None and result.expert_uses:
            tell = functools.partial(device.prompt_read, result.expert_uses)
            engine.decode.channel.send(Call(tell, lambda _result, _error: None))
        return then

    def failed(error: Exception | None) -> Control:
        def dropped() -> None:
            inbox.put(so_far)
            inbox.put(Failed(error))

        # The message drops what has arrived so far; only then may the session go on.
        return Truncate(session.cache, cached, dropped)

    engine.prefill.submit(
        PrefillJob(
            cache=session.cache,
            ids=ids,
            policy=engine.kv_policy,
            cancel=handle.cancellation.flag,
            progress=inbox.put,
            then=prefilled,
            failed=failed,
            arrived=lambda then: Call(lambda: None, lambda _result, _error: then()),
            logits_from=logits_from,
            next_id=next_id,
            counts_experts=counts_experts and len(ids) >= _LEAST_COUNTED_TOKENS,
            result=so_far,
        )
    )


def _start_generate(
    engine: Engine, handle: Handle, request: GenerateRequest
) -> Generator[Event, None, Finished]:
    session, inbox = request.session, handle.inbox
    submitted_seconds = time.monotonic()
    answer = Answer(engine.text_or_none, request.params.stop, session.timeline.ids)
    session.truncate(len(session) - 1)
    cached = len(session.cache)
    pending = session.timeline.ids[cached:]
    seed = request.params.seed if request.params.seed is not None else secrets.randbits(32)
    tokens = _native.TokenQueue()

    def done(end: DecodeEnd, error: Exception | None) -> None:
        inbox.put(Failed(error) if error else end)

    start = DecodeStart(
        cache=session.cache,
        position=len(session) - 1,
        sampler=make_sampler(
            request.params, seed, session.timeline.vocab_size, session.timeline.ids
        ),
        queue=tokens,
        cancel=handle.cancellation.flag,
        token=pending[-1],
        max_tokens=request.params.max_tokens or engine.context_tokens,
        context_tokens=engine.context_tokens,
        end_ids=[] if request.params.ignore_end else list(engine.end_ids),
        drafter=session.drafter,
        done=done,
    )
    stats = TurnStats(new_prompt_tokens=len(pending), cached_prompt_tokens=cached, seed=seed)
    _prefill(engine, session, handle, pending[:-1], start, next_id=pending[-1])
    return _generate_events(
        session, inbox, handle.cancellation, answer, tokens, stats, submitted_seconds
    )


def _generate_events(
    session: Session,
    inbox: Inbox,
    cancellation: Cancellation,
    answer: Answer,
    token_queue: _native.TokenQueue,
    stats: TurnStats,
    submitted_seconds: float,
) -> Generator[Event, None, Finished]:
    """Tokens as they come. The timeline takes a token when it is yielded; what decode made beyond
    that (it runs ahead of a slow reader, and of a stop string) is dropped at the end."""
    token_seconds: list[float] = []
    cut = False  # tokens were there that nobody wanted any more
    outcome: object = None
    decode_seconds = session.cache.decode_seconds
    try:
        finished = False
        while not finished:
            tokens, finished = token_queue.pop(POLL_SECONDS)
            while not inbox.empty():
                item = inbox.get()
                if isinstance(item, PrefillProgress | Queued):
                    yield item
                elif isinstance(item, PrefillResult):
                    stats = _prefilled(stats, item)
                else:
                    outcome = item
            finished = finished or isinstance(outcome, Failed)
            for token_id, seconds in tokens:
                if answer.stopped or cancellation.flag.raised:
                    cut = True
                    break
                session.timeline.extend([token_id])
                token_seconds.append(seconds)
                shown = answer.push(token_id)
                yield Token(token_id, shown, answer.reasoning)
                if answer.stopped:
                    cancellation()
        while outcome is None:
            item = inbox.get()
            outcome = None if isinstance(item, PrefillProgress | PrefillResult | Queued) else item
    finally:
        if outcome is None:
            _last_word(inbox, cancellation)
        # Whether decode had stepped the last token, too, is a matter of timing, and a prefill of it
        # rounds differently: after an answer that was stopped, later ones would vary.
        session.truncate(len(session) - 1)
        stats = session.last_stats = _arrived(stats, session, decode_seconds)
        session.end()
    reason: FinishReason = "cancelled"
    if isinstance(outcome, Failed):
        if outcome.error is not None:
            raise as_moechat_error(outcome.error)
    else:
        decoded = cast("DecodeEnd", outcome)
        if answer.stopped:
            reason = "stop"
        elif not cut:
            reason = cast("FinishReason", decoded.finish_reason)
        stats = replace(
            stats,
            decode_tokens=len(token_seconds),
            reasoning_tokens=answer.num_reasoning_tokens,
            decode_seconds=(token_seconds[-1] - decoded.started_seconds if token_seconds else 0.0),
            first_token_seconds=token_seconds[0] - submitted_seconds if token_seconds else 0.0,
            drafted=decoded.num_drafted,
            accepted=decoded.num_accepted,
            gpu_experts=_held_experts(session),
            decode_device=decoded.device,
        )
        session.last_stats = stats
    held_back = answer.flush()
    end = Finished(reason, held_back, stats, reasoning=answer.reasoning)
    yield end
    return end
