"""What the decode thread asks of a device that steps in place of the CPU; no torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moechat import _native
from moechat.kv.cache import KVCache


@dataclass(frozen=True)
class Decoding:
    """One session that is decoding, without speculation."""

    generation: _native.Generation
    cache: KVCache
    cancel: _native.CancelFlag


class DeviceDecode(Protocol):
    """Used by the decode thread alone."""

    name: str  # for people: "cuda:0"

    def generate(
        self, members: Sequence[Decoding], interrupt: _native.CancelFlag, max_steps: int
    ) -> int:
        """As generate() of cpp/decode/generate.h: the steps that each session did at most.

        What is raised is raised for all; the native caches then hold the tokens before the step.
        DoesNotFit, before a step: the sessions' caches need more memory than there is.
        """

    def truncated(self, cache: KVCache) -> None:
        """``cache`` was truncated just now."""

    @property
    def num_gpu_experts(self) -> int:
        """Routed experts of a layer that the device has room for; 0: the CPU has them all."""

    @property
    def num_held_experts(self) -> int:
        """Those that it holds, of a layer on average. From any thread."""

    def prompt_read(self, expert_uses: Mapping[int, NDArray[np.int64]]) -> None:
        """How often a prompt went to each expert [E], by MoE layer: its answer is next."""

    def close(self) -> None:
        """Let go of the device's memory."""
