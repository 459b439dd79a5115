"""What an engine does on GPUs, and how their memory is shared: prompts, and decode's steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moechat import _native
from moechat.engine.devices import torch_devices
from moechat.engine.gpu_room import GpuRoom
from moechat.engine.loading import LoadedModel
from moechat.errors import BadParameter, DeviceUnavailable, DoesNotFit

if TYPE_CHECKING:
    from moechat.decode.gpu.hybrid_loop import HybridDecode
    from moechat.prefill.gpu.gpu_prefill import GpuPrefill

# Below that the CPU has read most prompts before torch is imported.
SMALL_MODEL_BYTES = 4 << 30
_NO_DECODE = "answers cannot be written on a GPU, as --gpu-decode on asks for"
_LEAVE_OUT = "Without it the CPU does everything; `moechat doctor` tells what is here"


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
) -> Gpus:
    """What works on ``device``; "auto" is content with the CPU.

    ``decode``: whether its steps do, too; "auto" where their weights leave half of the memory, and
    never on torch's CPU device; "on" is an error where it cannot be.
    Raises DeviceUnavailable, DoesNotFit, and BadParameter for weights that cannot be streamed yet.
    """
    automatic = device == "auto"
    if automatic and decode != "on" and _weight_bytes(model) < SMALL_MODEL_BYTES:
        return Gpus()
    try:
        names = torch_devices(device)
        from moechat.prefill.gpu.gpu_prefill import GpuPrefill

        room = GpuRoom.of(
            names,
            model,
            compute=compute,
            memory_bytes=memory_bytes,
            context_tokens=context_tokens,
        )
        # torch's own CPU device is there for tests: the native kernels decode many times faster.
        steps_too = decode == "on" or (decode == "auto" and names[0] != "cpu" and room.is_ample())
        room.check(decode=steps_too)
        steps = _open_decode(decode, names[0], model, pool, compute, room) if steps_too else None
        memory = room.memory_bytes
        if memory is not None and steps is not None:
            memory -= steps.weights.num_bytes + (room.kv_bytes or 0)
        try:
            prompts = GpuPrefill(
                model.spec,
                model.tensors,
                names,
                compute=compute,
                memory_bytes=memory,
                context_tokens=context_tokens,
                warm=not automatic,
            )
        except BaseException:
            if steps is not None:
                steps.close()
            raise
    except (DeviceUnavailable, DoesNotFit, BadParameter) as error:
        if not automatic or (decode == "on" and isinstance(error, DoesNotFit)):
            raise
        if decode == "on":
            raise type(error)(_NO_DECODE, f"{error.what}: {error.why}", _LEAVE_OUT) from None
        what = "prompts are read" if decode == "off" else "prompts are read and answers written"
        return Gpus(notice=f"{what} by the CPU: {error.message}")
    return Gpus(prompts, steps)


def _open_decode(
    wanted: str,
    device: str,
    model: LoadedModel,
    pool: _native.ThreadPool,
    compute: str,
    room: GpuRoom,
) -> HybridDecode | None:
    """What makes decode's steps."""
    from moechat.decode.gpu.hybrid_loop import HybridDecode

    try:
        return HybridDecode(
            model.spec,
            model.tensors,
            model.native,
            pool,
            device=device,
            compute=compute,
            kv_limit_bytes=room.kv_bytes,
        )
    except BadParameter:  # of a format that decode's kernels do not read
        if wanted == "on":
            raise
        return None


def _weight_bytes(model: LoadedModel) -> int:
    return sum(file.stat().st_size for file in model.files.weight_files)
