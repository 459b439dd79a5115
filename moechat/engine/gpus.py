"""What an engine does on GPUs, and how their memory is shared: prompts, and decode's steps."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moechat import _native
from moechat.engine.devices import torch_devices
from moechat.engine.gpu_experts import hold_experts, unused_notice
from moechat.engine.gpu_room import DECODE_DOES_NOT_FIT, LEAVE_ANSWERS, GpuRoom
from moechat.engine.loading import LoadedModel
from moechat.errors import BadParameter, DeviceUnavailable, DoesNotFit

if TYPE_CHECKING:
    from moechat.decode.gpu.hybrid_loop import HybridDecode
    from moechat.prefill.gpu.gpu_prefill import GpuPrefill

# Below that the CPU has read most prompts before torch is imported.
SMALL_MODEL_BYTES = 4 << 30
_SWITCH_SECONDS = 2e-4
_NO_DECODE = "answers cannot be written on a GPU, as --gpu-decode on asks for"
_LEAVE_OUT = "Without it the CPU does everything; `moechat doctor` tells what is here"


@dataclass(frozen=True)
class Gpus:
    """``notice`` says what they do not do where a user would wonder."""

    prefill: GpuPrefill | None = None
    decode: HybridDecode | None = None
    notice: str = ""

    def close(self) -> None:
        """End the streams; decode's part is closed by the decode thread."""
        if self.prefill is not None:
            self.prefill.close()


def check_decode(device: str, wanted: bool, speculate: bool) -> None:
    """Raise what keeps decode off every GPU, as far as that is known before torch is there."""
    if device == "cpu":
        raise BadParameter(
            "gpu_decode cannot be 'on'",
            "the device is the CPU",
            "Leave it out, or name a GPU: --device cuda",
        )
    if speculate:
        raise BadParameter(
            "gpu_decode cannot be 'on'",
            "speculation is the CPU's",
            "Leave out --gpu-decode on or --speculate",
        )
    if not wanted:
        raise DeviceUnavailable(_NO_DECODE, "there is no GPU", _LEAVE_OUT)


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

    ``compute``: of prompts; "w8a8" is "bf16" for decode. ``decode``: whether its steps do, too;
    "auto" where their weights leave half of the memory, and never on torch's CPU device; "on" is an
    error where it cannot be. ``gpu_experts``: routed experts of a layer that are kept there for
    them, or "auto".
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
            room = GpuRoom.of(
                names,
                model,
                compute=compute,
                memory_bytes=memory_bytes,
                context_tokens=context_tokens,
            )
            prompts, steps = _open(
                names,
                model,
                pool,
                room,
                compute=compute,
                context_tokens=context_tokens,
                decode=decode,
                gpu_experts=gpu_experts,
                warm=not automatic,
            )
    except (DeviceUnavailable, DoesNotFit, BadParameter) as error:
        if not automatic or (decode == "on" and isinstance(error, DoesNotFit)):
            raise
        if decode == "on":
            raise type(error)(_NO_DECODE, f"{error.what}: {error.why}", _LEAVE_OUT) from None
        what = "prompts are read" if decode == "off" else "prompts are read and answers written"
        return Gpus(notice=f"{what} by the CPU: {error.message}")
    if steps is None:
        return Gpus(prompts, notice=unused_notice(gpu_experts))
    # Between two steps decode needs the interpreter, which a prompt's thread has all the time.
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))
    return Gpus(prompts, steps)


def _open(
    names: Sequence[str],
    model: LoadedModel,
    pool: _native.ThreadPool,
    room: GpuRoom,
    *,
    compute: str,
    context_tokens: int,
    decode: str,
    gpu_experts: int | str,
    warm: bool,
) -> tuple[GpuPrefill, HybridDecode | None]:
    """What reads prompts, and what makes decode's steps, on torch's devices ``names``."""
    from moechat.prefill.gpu.gpu_prefill import GpuPrefill

    # torch's own CPU device is there for tests: the native kernels decode many times faster.
    steps_too = decode == "on" or (decode == "auto" and names[0] != "cpu" and room.is_ample())
    room.check(decode=steps_too)
    of_decode = "bf16" if compute == "w8a8" else compute
    steps = _open_decode(decode, names[0], model, pool, of_decode, room) if steps_too else None
    held_bytes = 0
    try:
        if steps is not None:
            held_bytes = hold_experts(
                steps,
                gpu_experts,
                model,
                room,
                compute=of_decode,
                context_tokens=context_tokens,
            )
        prompts = GpuPrefill(
            model.spec,
            model.tensors,
            names,
            compute=compute,
            memory_bytes=room.prompt_bytes(decode=steps is not None, held_bytes=held_bytes),
            context_tokens=context_tokens,
            warm=warm,
            at_layer=contextlib.nullcontext if steps is None else steps.sharing.layer,
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
    room: GpuRoom,
) -> HybridDecode | None:
    """What makes decode's steps; "auto" is content with none where they find no room after all."""
    from moechat.decode.gpu.hybrid_loop import HybridDecode
    from moechat.prefill.gpu.device_errors import named_errors

    try:
        with named_errors(DECODE_DOES_NOT_FIT, LEAVE_ANSWERS):
            return HybridDecode(
                model.spec,
                model.tensors,
                model.native,
                pool,
                device=device,
                compute=compute,
                kv_limit_bytes=room.kv_bytes,
            )
    except (BadParameter, DoesNotFit):  # BadParameter: of a format that no GPU path reads
        if wanted == "on":
            raise
        return None


def _weight_bytes(model: LoadedModel) -> int:
    return sum(file.stat().st_size for file in model.files.weight_files)
