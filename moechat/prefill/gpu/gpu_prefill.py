"""Prefill on GPUs: the streams of weights that stay open, and the spans that use them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence

import numpy as np
import torch  # type: ignore[import-not-found, unused-ignore]
from numpy.typing import NDArray

from moechat import _native
from moechat.kv.cache import KVCache
from moechat.models.spec import BoundTensor, ModelSpec
from moechat.prefill.gpu import register
from moechat.prefill.gpu.device_errors import named_errors
from moechat.prefill.gpu.exchange import routes_between
from moechat.prefill.gpu.stream_plan import plan_stream
from moechat.prefill.gpu.stream_prefill import StreamPrefill
from moechat.prefill.gpu.streamed_source import StreamedSource
from moechat.prefill.span import LayerOutput, SpanFigures

CHUNK_TOKENS = 8192


class GpuPrefill:
    """The PrefillDevice of torch devices: one, or several that share the experts of a layer."""

    resumable = True

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Sequence[BoundTensor],
        devices: Sequence[str],
        *,
        compute: str = "bf16",
        memory_bytes: int | None = None,
        context_tokens: int | None = None,
        warm: bool = False,
        at_layer: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """``devices``: torch's names. ``memory_bytes`` of each are used; None: what is free.

        ``at_layer``: entered for each layer, of the first device: who shares it with others.
        ``warm``: files are page-locked and the first weights copied at once, on other threads.
        Raises DoesNotFit, and BadParameter for formats that cannot be streamed yet.
        """
        self._process = os.getpid()
        self.name = "+".join("torch-cpu" if name == "cpu" else name for name in devices)
        self._spec, self._at_layer = spec, at_layer
        self.max_tokens, settings = plan_stream(
            spec,
            tensors,
            devices,
            compute=compute,
            memory_bytes=memory_bytes,
            context_tokens=context_tokens or spec.context_tokens,
            chunk_tokens=CHUNK_TOKENS,
        )
        if len(devices) > 1 and not self.name.startswith("torch-cpu"):
            # Each of them page-locks what it copies, and all take of the same memory.
            limit = register.default_limit_bytes() // len(devices)
            settings = dataclasses.replace(settings, page_lock_bytes=limit)
        self.sources: list[StreamedSource] = []
        try:
            for number, device in enumerate(devices):
                self.sources.append(
                    StreamedSource(
                        spec,
                        tensors,
                        device=device,
                        compute=compute,
                        settings=settings,
                        experts=_share(spec, number, len(devices)),
                    )
                )
            self.pass_bytes = sum(source.expert_bytes for source in self.sources)
            self._used = False
            self._routes = routes_between([source.device for source in self.sources])
            self._meters = [_Meter(source) for source in self.sources]
            if warm:
                for source in self.sources:
                    source.begin(0)
        except BaseException:
            self.close()
            raise

    def span(
        self,
        cache: KVCache,
        ids: list[int],
        *,
        start_layer: int = 0,
        hidden_TD: NDArray[np.float32] | None = None,
    ) -> GpuSpan:
        """As in PrefillDevice."""
        with _named_errors():
            if self._used:  # what one that was cut has copied is not this one's
                for meter in self._meters:
                    meter.take()
            self._used = True
            stream = StreamPrefill(
                self._spec,
                self.sources,
                cache,
                ids,
                chunk_tokens=CHUNK_TOKENS,
                start_layer=start_layer,
                hidden_TD=hidden_TD,
                routes=self._routes,
            )
        return GpuSpan(stream, self._meters, self._at_layer)

    def close(self) -> None:
        """Wait for copies; let go of the mappings and the devices' memory. Idempotent.

        In a fork there is nothing to let go of: threads and devices stayed where it was opened.
        """
        if os.getpid() != self._process:
            return
        for source in self.sources:
            source.close()
        with contextlib.suppress(RuntimeError):  # of a device that has failed
            torch.cuda.empty_cache()  # else torch keeps it from other processes


class _Meter:
    """What a source did since it was asked last, what it did ahead included."""

    def __init__(self, source: StreamedSource) -> None:
        self._source = source
        self._before = source.statistics()

    def take(self) -> SpanFigures:
        """In bytes and seconds."""
        was, now = self._before, self._source.statistics()
        self._before = now
        return SpanFigures(
            streamed_bytes=now.copied_bytes - was.copied_bytes,
            stream_seconds=now.copy_seconds - was.copy_seconds,
            wait_seconds=now.stall_seconds - was.stall_seconds,
        )


class GpuSpan:
    """A PrefillSpan that is cut between layers only; its layers are whole or not there."""

    def __init__(
        self,
        stream: StreamPrefill,
        meters: Sequence[_Meter],
        at_layer: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._stream, self._meters, self._at_layer = stream, meters, at_layer
        self._never = _native.CancelFlag()

    def run_layer(self, cancel: _native.CancelFlag, window: int = 0) -> LayerOutput | None:
        """As in PrefillSpan. DoesNotFit when the GPU's memory is full."""
        if cancel.raised:
            return None
        with _named_errors(), self._at_layer():
            return self._stream.run_layer(self._never, window)

    def logits(self, cancel: _native.CancelFlag, first: int) -> NDArray[np.float32] | None:
        """As in PrefillSpan."""
        with _named_errors():
            return self._stream.logits(cancel, first)

    def draft(self, next_id: int | None, cancel: _native.CancelFlag) -> None:
        """None: the draft layer is not streamed."""

    @property
    def hidden_TD(self) -> NDArray[np.float32]:
        """As in PrefillSpan; in host memory."""
        with _named_errors():
            return self._stream.hidden_TD

    def figures(self) -> SpanFigures:
        """Of several devices: bytes of all, the longest seconds."""
        with _named_errors():
            figures = [meter.take() for meter in self._meters]
        backends = dict.fromkeys(str(backend) for backend in self._stream.attention_backends)
        return SpanFigures(
            streamed_bytes=sum(taken.streamed_bytes for taken in figures),
            stream_seconds=max(taken.stream_seconds for taken in figures),
            wait_seconds=max(taken.wait_seconds for taken in figures),
            attention=", ".join(backends),
        )


def _share(spec: ModelSpec, number: int, count: int) -> slice | None:
    """The experts of one device of several; None for all."""
    if count == 1 or spec.moe is None:
        return None
    first, last = (spec.moe.num_experts * i // count for i in (number, number + 1))
    return slice(first, last)


def _named_errors() -> contextlib.AbstractContextManager[None]:
    return named_errors(
        "the prompt does not fit into the GPU's memory",
        "Lower --gpu-memory, which leaves more for it, or use --device cpu",
    )
