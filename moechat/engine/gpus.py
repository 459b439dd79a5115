"""What an engine does on GPUs, and how their memory is shared: prompts, and decode's steps."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moechat import _native
from moechat.engine.devices import import_torch, torch_devices
from moechat.engine.gpu_experts import hold_experts
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
_SWITCH_SECONDS = 2e-4


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
    gpu_experts: int | str = 0,
) -> Gpus:
    """What works on ``device``; "auto" is content with the CPU.

    ``decode``: whether its steps do, too; "auto" where their weights leave half of the memory.
    ``gpu_experts``: routed experts of a layer that are kept there for them, or "auto".
    Raises DeviceUnavailable, DoesNotFit, and BadParameter for weights that cannot be streamed yet.
    """
    automatic = device == "auto"
    if automatic and decode != "on" and _weight_bytes(model) < SMALL_MODEL_BYTES:
        return Gpus()
    try:
        names = torch_devices(device)
        from moechat.prefill.gpu.gpu_prefill import GpuPrefill
        from moechat.prefill.gpu.stream_plan import free_memory_bytes

        memory = free_memory_bytes(names) if memory_bytes is None else memory_bytes
        steps, taken_bytes = _open_decode(decode, names[0], model, pool, compute, memory)
        try:
            if steps is not None:
                taken_bytes += hold_experts(
                    steps,
                    gpu_experts,
                    model,
                    compute=compute,
                    left_bytes=None if memory is None else memory - taken_bytes,
                    context_tokens=context_tokens,
                )
            prompts = GpuPrefill(
                model.spec,
                model.tensors,
                names,
                compute=compute,
                memory_bytes=None if memory is None else memory - taken_bytes,
                context_tokens=context_tokens,
                warm=not automatic,
                at_layer=contextlib.nullcontext if steps is None else steps.sharing.layer,
            )
        except BaseException:
            if steps is not None:
                steps.close()
            raise
    except (DeviceUnavailable, DoesNotFit, BadParameter) as error:
        if not automatic:
            raise
        return Gpus(notice=f"prompts are read by the CPU: {error.message}")
    if steps is not None:
        # Between two steps decode needs the interpreter, which a prompt's thread has all the time.
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))
    return Gpus(prompts, steps)


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
    kv_bytes, limit_bytes = 0, sys.maxsize
    if memory_bytes is not None:
        kv_bytes = memory_bytes // _KV_SHARE
        limit_bytes = memory_bytes // (_DECODE_SHARE if wanted == "auto" else 1)
    steps = None
    try:
        _check_fit(_stored_bytes(model) + kv_bytes, limit_bytes)
        steps = _load_decode(device, model, pool, compute, kv_bytes or None)
        # Formats that decode's kernels do not read, and exact mode, take more than what is stored.
        taken_bytes = steps.weights.num_bytes + kv_bytes
        _check_fit(taken_bytes, limit_bytes)
    except (BadParameter, DoesNotFit):
        if steps is not None:
            steps.close()
        if wanted == "on":
            raise
        return None, 0
    return steps, taken_bytes


def _load_decode(
    device: str,
    model: LoadedModel,
    pool: _native.ThreadPool,
    compute: str,
    kv_bytes: int | None,
) -> HybridDecode:
    """BadParameter for formats that no GPU path reads; DoesNotFit."""
    from moechat.decode.gpu.hybrid_loop import HybridDecode

    try:
        return HybridDecode(
            model.spec,
            model.tensors,
            model.native,
            pool,
            device=device,
            compute=compute,
            kv_limit_bytes=kv_bytes,
        )
    except import_torch().OutOfMemoryError:
        raise _does_not_fit("there is less memory than it takes") from None


def _check_fit(needed_bytes: int, limit_bytes: int) -> None:
    if needed_bytes > limit_bytes:
        raise _does_not_fit(
            f"{size_text(needed_bytes)} are needed, and {size_text(limit_bytes)} are there"
        )


def _does_not_fit(why: str) -> DoesNotFit:
    return DoesNotFit(
        "decoding on the GPU does not fit its memory", why, "Leave it to the CPU: --gpu-decode off"
    )


def _stored_bytes(model: LoadedModel) -> int:
    """Of all that is no routed expert and no embedding: the GPU holds that at least."""
    return sum(
        part.array.nbytes
        for tensor in model.tensors
        if ".experts." not in tensor.spec.role and tensor.spec.role != "embedding"
        for part in (tensor.data, tensor.scale, tensor.zeros)
        if part is not None
    )


def _weight_bytes(model: LoadedModel) -> int:
    return sum(file.stat().st_size for file in model.files.weight_files)
