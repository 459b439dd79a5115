"""What an engine does on GPUs, and how their memory is shared: prompts, and decode's steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moechat import _native
from moechat.engine.devices import torch_devices
from moechat.engine.loading import LoadedModel
from moechat.errors import BadParameter, DeviceUnavailable, DoesNotFit
from moechat.sizes import size_text

if TYPE_CHECKING:
    from moechat.decode.gpu.hybrid_loop import HybridDecode
    from moechat.prefill.gpu.gpu_prefill import GpuPrefill

# Below that the CPU has read most prompts before torch is imported.
SMALL_MODEL_BYTES = 4 << 30
# Of a GPU's memory: for copies of KV caches, and what "auto" gives decode with its weights at most.
_KV_SHARE, _DECODE_SHARE = 8, 2


@dataclass(frozen=True)
class Gpus:
    """``notice`` says why there are none where a user would wonder."""

    prefill: GpuPrefill | None = None
    decode: HybridDecode | None = None
    notice: str = ""

    def close(self) -> None:
        """End the streams; decode's part is closed by the decode thread."""
        if self.prefill is not None:
            self.prefill.close()


def open_gpus(
    device: str,
    model: LoadedModel,
    pool: _native.ThreadPool,
    *,
    compute: str,
    memory_bytes: int | None,
    context_tokens: int,
    decode: str,
) -> Gpus:
    """What works on ``device``; "auto" is content with the CPU.

    ``compute``: of prompts; "w8a8" is "bf16" for decode. ``decode``: whether its steps do, too;
    "auto" where their weights leave half of the memory.
    Raises DeviceUnavailable, DoesNotFit, and BadParameter for weights that cannot be streamed yet.
    """
    automatic = device == "auto"
    asked_for = decode == "on" or compute == "w8a8"
    if automatic and not asked_for and _weight_bytes(model) < SMALL_MODEL_BYTES:
        return Gpus()
    try:
        names = torch_devices(device)
        from moechat.prefill.gpu.device_errors import named_errors

        with named_errors("the GPU's memory is full", "Free some of it, or use --device cpu"):
            prompts, steps = _open(
                names, model, pool, compute, memory_bytes, context_tokens, decode, not automatic
            )
    except (DeviceUnavailable, DoesNotFit, BadParameter) as error:
        if not automatic:
            raise
        return Gpus(notice=f"prompts are read by the CPU: {error.message}")
    return Gpus(prompts, steps)


def _open(
    names: Sequence[str],
    model: LoadedModel,
    pool: _native.ThreadPool,
    compute: str,
    memory_bytes: int | None,
    context_tokens: int,
    decode: str,
    warm: bool,
) -> tuple[GpuPrefill, HybridDecode | None]:
    """What reads prompts, and what makes decode's steps, on torch's devices ``names``."""
    from moechat.prefill.gpu.gpu_prefill import GpuPrefill
    from moechat.prefill.gpu.stream_plan import free_memory_bytes

    bounds = [size for size in (memory_bytes, free_memory_bytes(names)) if size is not None]
    memory = min(bounds, default=None)
    of_decode = "bf16" if compute == "w8a8" else compute
    steps, taken_bytes = _open_decode(decode, names[0], model, pool, of_decode, memory)
    try:
        prompts = GpuPrefill(
            model.spec,
            model.tensors,
            names,
            compute=compute,
            memory_bytes=None if memory is None else memory - taken_bytes,
            context_tokens=context_tokens,
            warm=warm,
        )
    except BaseException:
        if steps is not None:
            steps.close()
        raise
    return prompts, steps


def _open_decode(
    wanted: str,
    device: str,
    model: LoadedModel,
    pool: _native.ThreadPool,
    compute: str,
    memory_bytes: int | None,
) -> tuple[HybridDecode | None, int]:
    """What makes decode's steps, and the memory that it takes."""
    if wanted == "off" or (wanted == "auto" and memory_bytes is None):
        return None, 0
    kv_bytes = None if memory_bytes is None else memory_bytes // _KV_SHARE
    if memory_bytes is not None and kv_bytes is not None:
        needed = _resident_bytes(model) + kv_bytes
        if wanted == "auto" and needed > memory_bytes // _DECODE_SHARE:
            return None, 0
        if needed > memory_bytes:
            raise DoesNotFit(
                "decoding on the GPU does not fit its memory",
                f"{size_text(needed)} are needed, and {size_text(memory_bytes)} are there",
                "Leave it to the CPU: --gpu-decode off",
            )
    from moechat.decode.gpu.hybrid_loop import HybridDecode

    try:
        steps = HybridDecode(
            model.spec,
            model.tensors,
            model.native,
            pool,
            device=device,
            compute=compute,
            kv_limit_bytes=kv_bytes,
        )
    except BadParameter:  # of a format that decode's kernels do not read
        if wanted == "on":
            raise
        return None, 0
    return steps, steps.weights.num_bytes + (kv_bytes or 0)


def _resident_bytes(model: LoadedModel) -> int:
    """Of all that is no routed expert and no embedding."""
    return sum(
        part.array.nbytes
        for tensor in model.tensors
        if ".experts." not in tensor.spec.role and tensor.spec.role != "embedding"
        for part in (tensor.data, tensor.scale, tensor.zeros)
        if part is not None
    )


def _weight_bytes(model: LoadedModel) -> int:
    return sum(file.stat().st_size for file in model.files.weight_files)
