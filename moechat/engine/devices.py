"""Which device reads prompts: what was asked for, what this machine has."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moechat.engine.loading import LoadedModel
from moechat.errors import BadParameter, DeviceUnavailable, DoesNotFit

if TYPE_CHECKING:
    from moechat.prefill.gpu.gpu_prefill import GpuPrefill

# Below that the CPU has read most prompts before torch is imported.
SMALL_MODEL_BYTES = 4 << 30
_INSTALL = "Install it: pip install 'moechat[gpu]'"


@dataclass(frozen=True)
class Opened:
    """``gpu`` reads prompts, or None; ``notice`` says why not where a user would wonder."""

    gpu: GpuPrefill | None = None
    notice: str = ""


def open_gpu(
    device: str,
    model: LoadedModel,
    *,
    compute: str,
    memory_bytes: int | None,
    context_tokens: int,
) -> Opened:
    """What reads prompts on ``device``; "auto" is content with the CPU.

    Raises DeviceUnavailable, DoesNotFit, and BadParameter for weights that cannot be streamed yet.
    """
    automatic = device == "auto"
    if automatic and _weight_bytes(model) < SMALL_MODEL_BYTES:
        return Opened()
    try:
        names = torch_devices(device)
        from moechat.prefill.gpu.gpu_prefill import GpuPrefill

        gpu = GpuPrefill(
            model.spec,
            model.tensors,
            names,
            compute=compute,
            memory_bytes=memory_bytes,
            context_tokens=context_tokens,
        )
    except (DeviceUnavailable, DoesNotFit, BadParameter) as error:
        if not automatic:
            raise
        return Opened(notice=f"prompts are read by the CPU: {error.message}")
    return Opened(gpu)


def _weight_bytes(model: LoadedModel) -> int:
    return sum(file.stat().st_size for file in model.files.weight_files)


def torch_devices(device: str) -> Sequence[str]:
    """torch's names of the devices that ``device`` means. Imports torch; DeviceUnavailable."""
    if device.startswith("torch-cpu"):
        count = int(device.partition(":")[2] or 1)
        _import_torch()
        return ["cpu"] * count
    torch = _import_torch()
    if not torch.cuda.is_available():
        raise DeviceUnavailable(
            "there is no GPU that torch can use",
            "torch was built without CUDA"
            if torch.version.cuda is None
            else "the driver is missing, too old, or shows no device",
            "--device cpu works without it",
        )
    count = torch.cuda.device_count()
    if device == "cuda:all":
        return [f"cuda:{number}" for number in range(count)]
    names = ["cuda:0"] if device in ("auto", "cuda") else device.split(",")
    for name in names:
        if int(name.partition(":")[2]) >= count:
            raise DeviceUnavailable(
                f"there is no {name}", f"this machine has {count}, counted from cuda:0"
            )
    if len(set(names)) < len(names):
        raise BadParameter(f"device {device[:40]!a} names one twice")
    return names


def _import_torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise DeviceUnavailable(
            "a GPU cannot be used without torch", str(error), _INSTALL
        ) from None
