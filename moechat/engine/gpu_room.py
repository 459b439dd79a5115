"""How much of a GPU's memory there is, what prompts and decode need of it, and whether it fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moechat.engine.loading import LoadedModel
from moechat.errors import DoesNotFit
from moechat.sizes import size_text

# Of the memory: for copies of KV caches, and what "auto" gives decode with its weights at most.
_KV_SHARE, _DECODE_SHARE = 8, 2
DECODE_DOES_NOT_FIT = "decoding and reading prompts on the GPU do not fit its memory"
LEAVE_ANSWERS = "Leave answers to the CPU: --gpu-decode off"


@dataclass(frozen=True)
class GpuRoom:
    """Bytes of each GPU. ``memory_bytes`` None: without a limit; ``free_bytes`` None: unknown."""

    memory_bytes: int | None
    free_bytes: int | None
    decode_bytes: int  # all weights but the routed experts'
    stream_bytes: int  # the least with which prompts can be read

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        model: LoadedModel,
        *,
        compute: str,
        memory_bytes: int | None,
        context_tokens: int,
    ) -> GpuRoom:
        """Of torch's devices; never more of them than is free, ``memory_bytes`` None: all of that.

        Raises BadParameter for formats that cannot be streamed yet.
        """
        from moechat.decode.gpu.resident_weights import resident_bytes
        from moechat.gpu_weights.stored import StoredWeights
        from moechat.prefill.gpu.gpu_prefill import CHUNK_TOKENS
        from moechat.prefill.gpu.stream_plan import free_memory_bytes, least_memory_bytes

        free, weights = free_memory_bytes(names), StoredWeights.of(model.tensors)
        bounds = [size for size in (memory_bytes, free) if size is not None]
        return cls(
            memory_bytes=min(bounds, default=None),
            free_bytes=free,
            decode_bytes=resident_bytes(weights, compute),
            stream_bytes=least_memory_bytes(
                model.spec,
                weights,
                compute=compute,
                context_tokens=context_tokens,
                chunk_tokens=CHUNK_TOKENS,
            ),
        )

    @property
    def kv_bytes(self) -> int | None:
        """What copies of KV caches may take where decode steps there."""
        return None if self.memory_bytes is None else self.memory_bytes // _KV_SHARE

    def prompt_bytes(self, *, decode: bool, held_bytes: int = 0) -> int | None:
        """What is left for prompts, beside decode if it steps there; None: there is no limit.

        ``held_bytes``: of the routed experts that decode holds.
        """
        if self.memory_bytes is None or self.kv_bytes is None:
            return None
        steps = self.decode_bytes + self.kv_bytes + held_bytes if decode else 0
        return max(0, self.memory_bytes - steps)

    def is_ample(self) -> bool:
        """Whether "auto" lets decode step there: half holds its part, and prompts fit beside it."""
        if self.memory_bytes is None or self.kv_bytes is None:
            return False
        steps = self.decode_bytes + self.kv_bytes
        fits = self.needed_bytes(decode=True) <= self.memory_bytes
        return fits and steps <= self.memory_bytes // _DECODE_SHARE

    def needed_bytes(self, *, decode: bool) -> int:
        """The least memory for prompts, and for decode if it steps there, its KV caches counted."""
        if not decode:
            return self.stream_bytes
        weights = self.decode_bytes + self.stream_bytes
        return math.ceil(weights * _KV_SHARE / (_KV_SHARE - 1))

    def check(self, *, decode: bool) -> None:
        """DoesNotFit, which says what would do, unless there is room for that."""
        if self.memory_bytes is None or self.needed_bytes(decode=decode) <= self.memory_bytes:
            return
        needed = self.needed_bytes(decode=decode)
        raise DoesNotFit(
            DECODE_DOES_NOT_FIT if decode else "the weights cannot be streamed through this GPU",
            f"{size_text(needed)} are needed, and {size_text(self.memory_bytes)} are there",
            self._advice(needed, decode),
        )

    def check_experts(self, number: int, one_bytes: int) -> None:
        """DoesNotFit, which says how many do, unless decode can hold so many of each layer.

        ``one_bytes``: of one of each.
        """
        left_bytes = self.prompt_bytes(decode=True)
        if left_bytes is None or left_bytes - number * one_bytes >= self.stream_bytes:
            return
        fits = max(0, left_bytes - self.stream_bytes) // one_bytes
        raise DoesNotFit(
            f"{number} experts a layer do not fit the GPU's memory",
            f"they take {size_text(number * one_bytes)}, and {size_text(left_bytes)} are left for "
            "them and for reading prompts",
            f"--gpu-experts may be up to {fits}, or auto" if fits else "Leave out --gpu-experts",
        )

    def _advice(self, needed_bytes: int, decode: bool) -> str:
        cpu = "use the CPU: --device cpu"
        if decode:
            # Without decode it may be too little all the same.
            enough = self.memory_bytes is not None and self.stream_bytes <= self.memory_bytes
            off = LEAVE_ANSWERS[0].lower() + LEAVE_ANSWERS[1:]
            cpu = off if enough else f"{cpu}, without --gpu-decode on"
        if self.memory_bytes == self.free_bytes:
            return cpu[0].upper() + cpu[1:]
        if self.free_bytes is not None and needed_bytes > self.free_bytes:
            return f"Only {size_text(self.free_bytes)} of it are free; {cpu}"
        return f"--gpu-memory {memory_text(needed_bytes)} is enough, or {cpu}"


def memory_text(num_bytes: int) -> str:
    """As --gpu-memory takes it, and not less: "34MB", "12.4GB"."""
    if num_bytes <= 999 * 10**6:
        return f"{max(1, -(-num_bytes // 10**6))}MB"
    tenths = -(-num_bytes // 10**8)
    return f"{tenths // 10}GB" if tenths % 10 == 0 else f"{tenths / 10:.1f}GB"
