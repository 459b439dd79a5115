"""A prefill that was cancelled between two layers, kept in host memory for the same prompt."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moechat.kv.cache import KVCache
from moechat.models.spec import ModelSpec
from moechat.prefill.job import PrefillJob
from moechat.prefill.span import LayerOutput, PrefillDevice
from moechat.weights.free_memory import free_memory_bytes

MAX_BYTES = 8 << 30
FREE_SHARE = 16  # of the free memory one in so many


def default_limit_bytes() -> int:
    """What a suspended prefill may take when nothing else was said."""
    return min(MAX_BYTES, (free_memory_bytes() or 0) // FREE_SHARE)


def needed_bytes(spec: ModelSpec, cache: KVCache, num_tokens: int) -> int:
    """Of hidden states and of the KV of all layers, in the cache's type."""
    slot_bytes = cache.num_layers * spec.kv_width * (2 if cache.compute == "bf16" else 4)
    return num_tokens * (4 * spec.hidden_size + slot_bytes)


@dataclass(frozen=True)
class Suspended:
    """``outputs`` of the layers that had run, and the residual stream behind them."""

    cache: weakref.ref[KVCache]
    epoch: int  # of the cache when the prefill began
    first_position: int
    ids: list[int]
    window: int
    device: PrefillDevice
    outputs: list[LayerOutput]
    hidden_TD: NDArray[np.float32]


class Shelf:
    """Room for one. Whatever comes next takes it or clears it away, and so does its cache's end."""

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._kept: Suspended | None = None

    def has_room(self, spec: ModelSpec, job: PrefillJob) -> bool:
        """Whether a job's layers may be kept while it runs."""
        limit = default_limit_bytes() if self._limit_bytes is None else self._limit_bytes
        return needed_bytes(spec, job.cache, len(job.ids)) <= limit

    def put(self, suspended: Suspended) -> None:
        """Keep it, for the next job to ask for."""
        self._kept = suspended
        if (cache := suspended.cache()) is not None:
            weakref.finalize(cache, self._forget, weakref.ref(suspended))

    def clear(self) -> None:
        """Keep nothing."""
        self._kept = None

    def _forget(self, suspended: weakref.ref[Suspended]) -> None:
        if self._kept is suspended():
            self._kept = None

    def take(self, job: PrefillJob, device: PrefillDevice) -> Suspended | None:
        """What was kept, if the job is the same at the same place; the shelf is empty then."""
        kept, self._kept = self._kept, None
        if kept is None or kept.device is not device:
            return None
        # One more: the cut dropped what had arrived, and nothing else has touched the cache since.
        same = (
            kept.cache() is job.cache
            and kept.epoch + 1 == job.cache.epoch
            and kept.first_position == len(job.cache)
            and kept.window == job.policy.window
            and kept.ids == job.ids
        )
        return kept if same else None
