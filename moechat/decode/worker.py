"""The decode thread: the only writer of KV caches. Applies packets, then steps all generations."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moechat import _native
from moechat.decode.device_decode import Decoding, DeviceDecode
from moechat.decode.step import DecodeStep, StepRow
from moechat.errors import DoesNotFit, EngineClosed, PacketRefused
from moechat.kv.cache import KVCache
from moechat.kv.channel import Channel
from moechat.kv.packet import KVPacket


@dataclass(frozen=True)
class Truncate:
    """Keep a cache's tokens below a position. ``done`` is called on the decode thread."""

    cache: KVCache
    position: int
    done: Callable[[], None]


@dataclass(frozen=True)
class StepLast:
    """Step one token at ``position``, logits [vocab] to ``done``; token None: only wait for KV."""

    cache: KVCache
    position: int  # tokens whose KV every layer must have by then
    token: int | None
    done: Callable[[NDArray[np.float32] | None, Exception | None], None]


@dataclass(frozen=True)
class DecodeEnd:
    """How a generation went. ``started_seconds``: time.monotonic() when the first step was due."""

    finish_reason: str = ""
    started_seconds: float = 0.0
    num_drafted: int = 0  # drafts that were verified
    num_accepted: int = 0
    device: str = ""  # that made the steps, or several in order


@dataclass(frozen=True)
class DecodeStart:
    """Decode from ``token`` at ``position`` on until it finishes.

    ``drafter`` speculates, or None. ``done(end, error)`` is called on the decode thread after the
    queue was closed.
    """

    cache: KVCache
    position: int  # tokens whose KV every layer must have by then
    sampler: _native.Sampler
    queue: _native.TokenQueue
    cancel: _native.CancelFlag
    token: int
    max_tokens: int
    context_tokens: int
    end_ids: list[int]
    drafter: _native.Drafter | None
    done: Callable[[DecodeEnd, Exception | None], None]


@dataclass(frozen=True)
class _Running:
    start: DecodeStart
    generation: _native.Generation
    started_seconds: float
    devices: dict[str, None] = field(default_factory=dict)  # that have stepped it, in order


@dataclass(frozen=True)
class Call:
    """Do something with a cache between two steps. ``done(result, error)`` as for StepLast."""

    action: Callable[[], Any]
    done: Callable[[Any, Exception | None], None]


@dataclass(frozen=True)
class Attach:
    """Make a cache known, so that its packets are applied as long as somebody holds it."""

    cache: KVCache


@dataclass(frozen=True)
class Close:
    """End the thread; running generations are cancelled."""


# How much of a step's time goes to messages between two steps at most; but always one of them, or a
# part of a packet.
MESSAGES_SHARE = 0.1

Control = Truncate | StepLast | DecodeStart | Call | Attach | Close


class DecodeWorker:
    """One thread, one channel in. Between two steps it looks at what arrived.

    ``device`` makes the steps of generations without a drafter, if there is one; it is closed with
    the thread.
    """

    def __init__(
        self,
        model: _native.Model,
        pool: _native.ThreadPool,
        channel_capacity: int,
        device: DeviceDecode | None = None,
    ) -> None:
        self._step, self.device = DecodeStep(model, pool), device
        self._interrupt = _native.CancelFlag()
        self.channel: Channel[Control] = Channel(channel_capacity, self._interrupt.raise_)
        self._caches: weakref.WeakValueDictionary[int, KVCache] = weakref.WeakValueDictionary()
        self._refused: dict[int, Exception] = {}  # first bad packet of a session
        self._arriving: tuple[int, Iterator[None]] | None = None  # a packet's session, its parts
        self._running: list[_Running] = []
        self._closing = False
        self._step_seconds = 0.0  # of the last steps, on average
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cancel what runs and end the thread."""
        self.channel.send(Close())
        if threading.current_thread() is not self._thread:  # the collector may run anywhere
            self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            self._interrupt.clear()
            all_read = self._read_channel()
            if self._running and not self._closing:
                self._generate(max_steps=0 if all_read else 1)
        for running in self._running:
            self._finish(running, "cancelled", None)
        try:
            if self.device is not None:
                with contextlib.suppress(RuntimeError):  # a failed one: whoever used it was told
                    self.device.close()
        finally:
            self.device = None  # its memory is free for the next engine
            self.channel.close()
            while message := self.channel.receive(block=False):
                self._refuse(message)

    def _read_channel(self) -> bool:
        """Handle what has arrived; False when, beside running generations, it took too long.

        Nothing that came after Close: whoever answers each message with another would go on.
        """
        began = time.monotonic()
        while not self._closing:
            if self._arriving is not None:
                self._apply_part(*self._arriving)
            elif message := self.channel.receive(block=not self._running):
                self._handle(message)
                del message  # its cache is not to live until the next one comes
            else:
                return True
            spent_seconds = time.monotonic() - began
            if self._running and spent_seconds > MESSAGES_SHARE * self._step_seconds:
                return False
        return True

    @staticmethod
    def _refuse(message: KVPacket | Control) -> None:
        """Tell whoever waits for a message that nobody will serve it any more."""
        error = EngineClosed("the engine was closed")
        match message:
            case DecodeStart():
                message.queue.close()
                message.done(DecodeEnd(), error)
            case StepLast() | Call():
                message.done(None, error)
            case Truncate():
                message.done()

    def _generate(self, max_steps: int) -> None:
        """Step until a generation finishes or a message arrives; close what finished.

        ``max_steps`` 0: no limit.
        """
        began = time.monotonic()
        error: Exception | None = None
        try:
            steps = self._steps(max_steps)
            if steps:
                self._step_seconds = (time.monotonic() - began) / steps
        except Exception as failure:  # told to whoever waits: this thread serves everybody
            error = failure
        for running in list(self._running):
            reason, named = running.generation.finish_reason, running.generation.failure
            if error is not None or reason:
                self._running.remove(running)
                own = None if named is None else _native.NativeError(*named)
                self._finish(running, reason, own or error)
        del error  # its traceback holds this frame

    def _steps(self, max_steps: int) -> int:
        """Of the device, and of the CPU for who speculates: in turns, if there are both.

        So nobody's bits depend on who speculates beside him.
        """
        own = [r for r in self._running if self.device is None or r.start.drafter is not None]
        others = [running for running in self._running if running not in own]
        num_steps = 0
        if own and others:
            max_steps = 1
        if self.device is not None and others:
            members = [Decoding(r.generation, r.start.cache, r.start.cancel) for r in others]
            try:
                with _noted(self.device.name, others):
                    num_steps = self.device.generate(members, self._interrupt, max_steps)
            except DoesNotFit:
                own = self._running  # the caches have outgrown the device; the CPU's are whole
        if own:
            step, generations = self._step, [running.generation for running in own]
            with _noted("cpu", own):
                steps = _native.generate(
                    step.native, step.model, generations, self._interrupt, max_steps
                )
            num_steps = max(num_steps, steps)
        return num_steps

    @staticmethod
    def _finish(running: _Running, reason: str, error: Exception | None) -> None:
        running.start.queue.close()
        counts = (running.generation.num_drafted, running.generation.num_accepted)
        device = ", ".join(running.devices)
        running.start.done(DecodeEnd(reason, running.started_seconds, *counts, device), error)

    def _handle(self, message: KVPacket | Control) -> None:
        match message:
            case KVPacket():
                self._apply(message)
            case Attach(cache):
                self._caches[cache.session] = cache
            case Truncate(cache, position, done):
                self._refused.pop(cache.session, None)
                cache.truncate(position)
                if self.device is not None:
                    self.device.truncated(cache)
                done()
            case StepLast():
                self._step_last(message)
            case Call():
                self._call(message)
            case DecodeStart():
                self._start(message)
            case Close():
                self._closing = True

    @staticmethod
    def _call(message: Call) -> None:
        try:
            result = message.action()
        except Exception as error:  # told to whoever waits: this thread serves everybody
            message.done(None, error)
            return
        message.done(result, None)

    def _start(self, start: DecodeStart) -> None:
        now = time.monotonic()
        try:
            self._check_arrived(start.cache, start.position)
            start.cache.mark(start.position)
            generation = _native.Generation(
                self._step.model,
                start.cache.native,
                start.sampler,
                start.queue,
                start.cancel,
                start.token,
                start.position,
                start.max_tokens,
                start.context_tokens,
                start.end_ids,
                start.drafter,
                start.cache.draft,
            )
        except Exception as error:  # told to whoever waits: this thread serves everybody
            start.queue.close()
            start.done(DecodeEnd(), error)
            return
        self._running.append(_Running(start, generation, now))

    def _apply(self, packet: KVPacket) -> None:
        cache = self._caches.get(packet.session)
        if cache is None or packet.session in self._refused:
            return
        self._arriving = packet.session, cache.apply_parts(packet)

    def _apply_part(self, session: int, parts: Iterator[None]) -> None:
        try:
            next(parts)
        except StopIteration:
            self._arriving = None
        except Exception as error:  # reported with the message that waits for these packets
            self._arriving = None
            self._refused[session] = error

    def _check_arrived(self, cache: KVCache, position: int) -> None:
        """Raise what kept a packet out, or PacketRefused unless all KV has arrived."""
        refused = self._refused.pop(cache.session, None)
        if refused is not None:
            raise refused
        if cache.holds(position):
            cache.settle()
        else:
            raise PacketRefused("KV packets are missing", f"tokens below {position} lack")

    def _step_last(self, message: StepLast) -> None:
        cache = message.cache
        try:
            self._check_arrived(cache, message.position)
            logits = None
            if message.token is not None:
                (rows,) = self._step.run([StepRow(cache, [message.token])])
                logits = rows[0] if rows is not None else None
        except Exception as error:  # told to whoever waits: this thread serves everybody
            message.done(None, error)
            return
        message.done(logits, None)


@contextlib.contextmanager
def _noted(device: str, running: list[_Running]) -> Iterator[None]:
    """Who is stepped in here is stepped by ``device``, whatever ends it."""
    positions = [each.generation.position for each in running]
    try:
        yield
    finally:
        for each, position in zip(running, positions):
            if each.generation.position > position:
                each.devices[device] = None
