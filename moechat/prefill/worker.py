"""The prefill thread: takes jobs in order, sends KV packets as each layer ends.

First come, first served: a long prompt makes those behind it wait, and each of them is told how
many are before it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moechat import _native
from moechat.errors import EngineClosed, KVNotEncodable
from moechat.events import PrefillProgress, Queued
from moechat.kv.cache import KVCache
from moechat.kv.channel import Channel
from moechat.kv.packet import KVPacket, encode_packet, native_packet
from moechat.kv.policy import KVPolicy
from moechat.kv.tiers import DROPPED, Tier
from moechat.prefill.cpu import CpuPrefill, LayerOutput


@dataclass
class PrefillResult:
    """What a finished job tells, beside its packets."""

    seconds: float = 0.0
    kv_bytes: int = 0  # payload, scales and centres of all packets, the draft layer's included
    kv_native_bytes: int = 0  # of the same tokens at 2 bytes an element
    kv_native_layers: int = 0  # whose values the tiers could not hold
    kv_dropped_fraction: float = 0.0  # of the new tokens, averaged over the layers
    kv_encode_seconds: float = 0.0  # choosing tiers and encoding
    queued_seconds: float = 0.0  # before it was its turn
    logits: NDArray[np.float32] | None = None  # [logits_from.., vocab], when asked for


@dataclass(eq=False)
class PrefillJob:
    """Prefill ``ids`` after the tokens that the cache holds; their KV crosses as ``policy`` says.

    ``then`` is sent down the channel after the last packet, so that decode sees it when all KV has
    arrived; ``failed`` is sent instead when the job is cut (None) or breaks (an exception).
    """

    cache: KVCache
    ids: list[int]
    policy: KVPolicy
    cancel: _native.CancelFlag
    progress: Callable[[PrefillProgress | Queued], None]
    then: Callable[[PrefillResult], Any]
    failed: Callable[[Exception | None], Any]
    logits_from: int | None = None
    next_id: int | None = None  # the token after ``ids``, for the draft layer's last position
    result: PrefillResult = field(default_factory=PrefillResult)
    submitted_seconds: float = field(default_factory=time.perf_counter)


class PrefillWorker:
    """One thread. Jobs run one after another; each is cancellable between phases of a layer, and at
    once while it waits for its turn."""

    def __init__(
        self, model: _native.Model, pool: _native.ThreadPool, channel: Channel[Any]
    ) -> None:
        self._model, self._pool, self._channel = model, pool, channel
        self._closed = False
        self._waiting: deque[PrefillJob] = deque()
        self._busy = False  # a job is under way
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="prefill", daemon=True)
        self._thread.start()

    def submit(self, job: PrefillJob) -> None:
        """Queue a job; it is told how many are before it. Raises EngineClosed after close()."""
        with self._changed:
            if self._closed:
                raise EngineClosed("the engine was closed")
            self._waiting.append(job)
            if ahead := len(self._waiting) - 1 + self._busy:
                job.progress(Queued(ahead=ahead))
            self._changed.notify_all()

    def drop_cancelled(self) -> None:
        """End cancelled jobs that wait for their turn; from any thread."""
        with self._changed:
            dropped = []
            for job in tuple(self._waiting):
                # The collector may cancel another request right here, and call this once more.
                if job.cancel.raised and job in self._waiting:
                    self._waiting.remove(job)
                    dropped.append(job)
            if dropped:
                self._tell_waiting()
        for job in dropped:
            self._channel.send(job.failed(None))

    def close(self) -> None:
        """Let queued jobs end, then the thread. Cancel them first to be quick."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:  # the collector may run anywhere
            self._thread.join()

    def _tell_waiting(self) -> None:
        for ahead, job in enumerate(tuple(self._waiting), int(self._busy)):
            if ahead:
                job.progress(Queued(ahead=ahead))

    def _next(self) -> PrefillJob | None:
        """The job whose turn it is; None once the worker is closed and all are done."""
        with self._changed:
            self._busy = False
            self._changed.wait_for(lambda: bool(self._waiting) or self._closed)
            if not self._waiting:
                return None
            self._busy = True
            job = self._waiting.popleft()
            self._tell_waiting()
        job.result.queued_seconds = time.perf_counter() - job.submitted_seconds
        return job

    def _run(self) -> None:
        while (job := self._next()) is not None:
            self._serve(job)
            del job  # its cache and logits are not to live until the next one comes

    def _serve(self, job: PrefillJob) -> None:
        try:
            complete = self._prefill(job)
        except Exception as error:  # reported to whoever waits for the job
            self._channel.send(job.failed(error))
            return
        self._channel.send(job.then(job.result) if complete else job.failed(None))

    def _prefill(self, job: PrefillJob) -> bool:
        started = time.perf_counter()
        if job.cancel.raised:
            return False
        cache, first = job.cache, len(job.cache)
        epoch = cache.epoch
        positions = np.arange(first, first + len(job.ids), dtype=np.int32)
        span = CpuPrefill(self._model, self._pool, cache, job.ids)
        for layer in range(cache.num_layers):
            output = span.run_layer(job.cancel, job.policy.window)
            if output is None:
                return False
            if not self._send(job, _encode(job, epoch, layer, positions, output)):
                return False
            job.progress(
                PrefillProgress(
                    layers_done=layer + 1,
                    num_layers=cache.num_layers,
                    tokens=len(job.ids),
                    seconds=time.perf_counter() - started,
                )
            )
        if job.logits_from is not None:
            job.result.logits = span.logits(job.cancel, job.logits_from)
            if job.result.logits is None:
                return False
        if cache.draft is not None and (slots := span.draft(job.next_id, job.cancel)):
            packet = native_packet(cache.session, epoch, cache.num_layers, *slots)
            if not self._send(job, packet):
                return False
            job.result.kv_native_bytes += 2 * slots[1].size
        job.result.seconds = time.perf_counter() - started
        return True

    def _send(self, job: PrefillJob, packet: KVPacket) -> bool:
        if not self._channel.send_packet(packet, lambda: job.cancel.raised):
            return False
        job.result.kv_bytes += packet.num_bytes
        return True


def _encode(
    job: PrefillJob, epoch: int, layer: int, positions: NDArray[np.int32], output: LayerOutput
) -> KVPacket:
    """One layer's packet, as the policy has it.

    When a value does not fit its tier, what the policy keeps of this layer crosses NATIVE.
    """
    started = time.perf_counter()
    num_tokens, mass_n = len(positions), output.window_mass_n
    tiers = job.policy.tiers(
        layer, int(positions[0]), num_tokens, None if mass_n is None else mass_n[-num_tokens:]
    )
    if tiers[-1] == DROPPED:  # how far the cache is complete shows by the last slot
        raise ValueError(f"the KV policy {job.policy.name} dropped the last token")
    cache, rows = job.cache, output.kv_TW

    def encode(tiers: NDArray[np.uint8]) -> KVPacket:
        return encode_packet(
            cache.session,
            epoch,
            layer,
            positions,
            rows,
            tiers,
            cache.layout,
            centre_keys=job.policy.centre_keys,
        )

    try:
        packet = encode(tiers)
    except KVNotEncodable:
        job.result.kv_native_layers += 1
        packet = encode(np.where(tiers == DROPPED, tiers, np.uint8(Tier.NATIVE)))
    job.result.kv_native_bytes += 2 * rows.size
    job.result.kv_dropped_fraction += float(np.mean(tiers == DROPPED)) / cache.num_layers
    job.result.kv_encode_seconds += time.perf_counter() - started
    return packet
