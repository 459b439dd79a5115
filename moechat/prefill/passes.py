"""A job's passes through the layers: on which device, in how many parts, layer by layer."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moechat.errors import MoechatError
from moechat.events import PrefillProgress
from moechat.kv.channel import Channel
from moechat.kv.packet import KVPacket, native_packet
from moechat.models.spec import ModelSpec
from moechat.prefill.choice import DeviceChoice, Part
from moechat.prefill.job import PrefillJob
from moechat.prefill.packets import PacketThread, encode_layer
from moechat.prefill.span import LayerOutput, PrefillDevice, PrefillSpan, SpanFigures
from moechat.prefill.suspended import Shelf, Suspended

_POLL_SECONDS = 0.05


class Passes:
    """Runs one job at a time, on one thread."""

    def __init__(
        self,
        spec: ModelSpec,
        choice: DeviceChoice,
        channel: Channel[Any],
        suspended_bytes: int | None = None,
    ) -> None:
        self._spec, self._choice, self._channel = spec, choice, channel
        self._packets = PacketThread()
        self._shelf = Shelf(suspended_bytes)

    def run(self, job: PrefillJob) -> bool:
        """Prefill and send all packets; False when the job was cancelled."""
        if job.cancel.raised:
            return False
        run = _Run(job, self._choice.plan(len(job.ids)))
        try:
            complete = self._run_parts(run)
        finally:
            flushed = self._packets.flush()  # what comes next must stay behind these
        job.result.seconds = time.perf_counter() - run.started
        if not complete and any(part.device.pass_bytes for part in run.parts):
            job.result.compute_seconds = 0.0  # the waits in it are not known
        return complete and flushed

    def close(self) -> None:
        """End the thread of the packets, and let go of a prefill that was kept."""
        self._packets.close()
        self._shelf.clear()

    def _run_parts(self, run: _Run) -> bool:
        begin = 0
        for number, part in enumerate(run.parts):
            if number and not self._wait_for_packets(run.job):
                return False
            if not self._run_part(run, part, begin):
                return False
            begin += part.num_tokens
        return True

    def _wait_for_packets(self, job: PrefillJob) -> bool:
        """Until the cache holds the part before; False when the job was cancelled."""
        if not self._packets.flush():
            return False
        there = threading.Event()
        self._channel.send(job.arrived(there.set))
        while not there.wait(_POLL_SECONDS):
            if job.cancel.raised:
                return False
        return not job.cancel.raised

    def _run_part(self, run: _Run, part: Part, begin: int) -> bool:
        job, device = run.job, part.device
        cache, first = job.cache, len(job.cache)
        epoch, ids = cache.epoch, job.ids[begin : begin + part.num_tokens]
        whole = len(run.parts) == 1
        kept = self._shelf.take(job, device)
        keeps = whole and device.resumable and self._shelf.has_room(self._spec, job)
        started = time.perf_counter()
        job.result.device = device.name
        if kept is None:
            span = device.span(cache, ids)
        else:
            span = device.span(cache, ids, start_layer=len(kept.outputs), hidden_TD=kept.hidden_TD)
            job.result.resumed_layers = len(kept.outputs)
        positions = np.arange(first, first + len(ids), dtype=np.int32)
        outputs: list[LayerOutput] = []
        earlier = kept.outputs if kept else []
        del kept
        for layer, output in enumerate(_layers(span, job, earlier, cache.num_layers)):
            if output is not None and keeps:
                outputs.append(output)
            if output is None or not self._packets.put(
                functools.partial(self._send_layer, job, epoch, layer, positions, output)
            ):
                # Cut while they are sent again, the earlier ones are still what the span goes by.
                held = outputs if len(outputs) >= len(earlier) else earlier
                if keeps and held and job.cancel.raised:
                    self._keep(job, epoch, first, device, held, span)
                return False
            if job.counts_experts and device is self._choice.gpu:
                self._count_experts(job, layer, output)
            run.layer_done(part, layer)
        outputs.clear()  # nobody will ask for them
        if not self._finish(run, span, begin, epoch):
            return False
        seconds, figures = time.perf_counter() - started, span.figures()
        if not job.result.resumed_layers:
            self._choice.measured(device, len(ids), seconds, figures.stream_seconds)
        _count(job, figures)
        return True

    def _count_experts(self, job: PrefillJob, layer: int, output: LayerOutput) -> None:
        moe = self._spec.moe
        if moe is not None and output.router_ids_TK.size:
            ids = output.router_ids_TK.ravel()
            uses_E = np.bincount(ids, minlength=moe.num_experts).astype(np.int64)
            job.result.expert_uses[layer] = uses_E + job.result.expert_uses.get(layer, 0)

    def _keep(
        self,
        job: PrefillJob,
        epoch: int,
        first_position: int,
        device: PrefillDevice,
        outputs: list[LayerOutput],
        span: PrefillSpan,
    ) -> None:
        """For the same prompt, should it come again. Not if that fails: the job was cancelled."""
        with contextlib.suppress(MemoryError, MoechatError):
            self._shelf.put(
                Suspended(
                    cache=weakref.ref(job.cache),
                    epoch=epoch,
                    first_position=first_position,
                    ids=list(job.ids),
                    window=job.policy.window,
                    device=device,
                    outputs=outputs,
                    hidden_TD=span.hidden_TD,
                )
            )

    def _finish(self, run: _Run, span: PrefillSpan, begin: int, epoch: int) -> bool:
        """What comes after the last layer: logits, and the draft layer's slots."""
        job = run.job
        end = begin + run.parts[run.part].num_tokens
        last = end == len(job.ids)
        if job.logits_from is not None and job.logits_from < end:
            logits = span.logits(job.cancel, max(job.logits_from - begin, 0))
            if logits is None:
                return False
            run.logits.append(logits)
            if last:
                job.result.logits = logits if len(run.logits) == 1 else np.concatenate(run.logits)
        if job.cache.draft is not None:
            next_id = job.next_id if last else job.ids[end]
            if slots := span.draft(next_id, job.cancel):
                send = functools.partial(self._send_draft, job, epoch, slots)
                if not self._packets.put(send):
                    return False
        run.part += 1
        return True

    def _send_layer(
        self,
        job: PrefillJob,
        epoch: int,
        layer: int,
        positions: NDArray[np.int32],
        output: LayerOutput,
    ) -> bool:
        if job.cancel.raised:
            return False
        return self._send(job, encode_layer(job, epoch, layer, positions, output))

    def _send_draft(
        self, job: PrefillJob, epoch: int, slots: tuple[NDArray[np.int32], NDArray[Any]]
    ) -> bool:
        cache = job.cache
        job.result.kv_native_bytes += 2 * slots[1].size
        return self._send(job, native_packet(cache.session, epoch, cache.num_layers, *slots))

    def _send(self, job: PrefillJob, packet: KVPacket) -> bool:
        if not self._channel.send_packet(packet, lambda: job.cancel.raised):
            return False
        job.result.kv_bytes += packet.num_bytes
        return True


class _Run:
    """How far a job is."""

    def __init__(self, job: PrefillJob, parts: list[Part]) -> None:
        self.job, self.parts = job, parts
        self.part = 0
        self.logits: list[NDArray[np.float32]] = []
        self.started = time.perf_counter()
        job.result.num_layers = job.cache.num_layers * len(parts)

    def layer_done(self, part: Part, layer: int) -> None:
        """Tell the progress."""
        num_layers, result = self.job.cache.num_layers, self.job.result
        done = result.layers_done = self.part * num_layers + layer + 1
        seconds = time.perf_counter() - self.started
        streamed = part.device.pass_bytes * max(done - result.resumed_layers, 0) / num_layers
        self.job.progress(
            PrefillProgress(
                layers_done=done,
                num_layers=result.num_layers,
                tokens=len(self.job.ids),
                seconds=seconds,
                stream_bytes_per_second=streamed / seconds if seconds else 0.0,
                resumed_layers=result.resumed_layers,
            )
        )


def _layers(
    span: PrefillSpan, job: PrefillJob, earlier: list[LayerOutput], num_layers: int
) -> Iterator[LayerOutput | None]:
    """Every layer's output, those that an earlier job computed first; None ends a cut one."""
    yield from earlier
    for _ in range(len(earlier), num_layers):
        started = time.perf_counter()
        output = span.run_layer(job.cancel, job.policy.window)
        job.result.compute_seconds += time.perf_counter() - started
        yield output
        if output is None:
            return


def _count(job: PrefillJob, figures: SpanFigures) -> None:
    result = job.result
    result.streamed_bytes += figures.streamed_bytes
    result.stream_seconds += figures.stream_seconds
    result.wait_seconds += figures.wait_seconds
    result.compute_seconds = max(0.0, result.compute_seconds - figures.wait_seconds)
    result.attention = figures.attention
