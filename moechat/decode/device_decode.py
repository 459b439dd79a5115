"""What the decode thread asks of a device that steps in place of the CPU; no torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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

    def close(self) -> None:
        """Let go of the device's memory."""
