"""What the prefill thread is asked for, and what it tells in the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moechat import _native
from moechat.events import PrefillProgress, Queued
from moechat.kv.cache import KVCache
from moechat.kv.policy import KVPolicy


@dataclass
class PrefillResult:
    """What a job tells, beside its packets; one that was cut, how far it came."""

    seconds: float = 0.0
    kv_bytes: int = 0  # payload, scales and centres of all packets, the draft layer's included
    kv_native_bytes: int = 0  # of the same tokens at 2 bytes an element
    kv_native_layers: int = 0  # whose values the tiers could not hold
    kv_dropped_fraction: float = 0.0  # of the new tokens, averaged over the layers
    kv_encode_seconds: float = 0.0  # choosing tiers and encoding, beside the next layer's computing
    queued_seconds: float = 0.0  # before it was its turn
    logits: NDArray[np.float32] | None = None  # [logits_from.., vocab], when asked for
    device: str = ""  # that read the prompt
    streamed_bytes: int = 0  # weights that crossed to it
    stream_seconds: float = 0.0  # their copies, which run beside computing
    compute_seconds: float = 0.0  # of the layers, less the waits
    wait_seconds: float = 0.0  # computing waited for weights
    attention: str = ""  # the kernels that did it; "" on the CPU
    resumed_layers: int = 0  # that an earlier, cancelled job had computed
    num_layers: int = 0  # of all parts; 0 while the job has not begun
    layers_done: int = 0
    # How often the tokens went to each expert [E], by MoE layer, as far as a GPU read them.
    expert_uses: dict[int, NDArray[np.int64]] = field(default_factory=dict)


@dataclass(eq=False)
class PrefillJob:
    """Prefill ``ids`` after the tokens that the cache holds; their KV crosses as ``policy`` says.

    ``then`` is sent down the channel after the last packet, so that decode sees it when all KV has
    arrived; ``failed`` is sent instead when the job is cut (None) or breaks (an exception).
    ``arrived`` makes a message that calls back once all that was sent before it is in the cache.
    """

    cache: KVCache
    ids: list[int]
    policy: KVPolicy
    cancel: _native.CancelFlag
    progress: Callable[[PrefillProgress | Queued], None]
    then: Callable[[PrefillResult], Any]
    failed: Callable[[Exception | None], Any]
    arrived: Callable[[Callable[[], None]], Any]
    logits_from: int | None = None
    next_id: int | None = None  # the token after ``ids``, for the draft layer's last position
    counts_experts: bool = False  # ``result.expert_uses`` is wanted
    result: PrefillResult = field(default_factory=PrefillResult)
    submitted_seconds: float = field(default_factory=time.perf_counter)
