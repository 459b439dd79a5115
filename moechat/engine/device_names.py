"""What devices are called, and whether a GPU may be there: told without loading anything."""

from __future__ import annotations

import os
import re

from moechat.errors import BadParameter

# There as soon as a driver is: of NVIDIA's, and of Windows' for the Linux beside it.
_GPU_FILES = ("/dev/nvidiactl", "/dev/dxg")
_DEVICES = re.compile(r"cpu|auto|cuda(:all|:\d{1,3}(,cuda:\d{1,3})*)?|torch-cpu(:[1-9])?", re.ASCII)


def check_device(text: str) -> None:
    """BadParameter unless ``text`` is the name of a device, whether or not it is there."""
    if not _DEVICES.fullmatch(text):
        raise BadParameter(
            f"device cannot be {text[:40]!a}",
            "cpu, auto, cuda, cuda:all, or numbers as in cuda:0,cuda:1",
        )
    names = named_gpus(text)
    if len(set(names)) < len(names):
        raise BadParameter(f"device cannot be {text[:40]!a}", "every GPU once, as in cuda:0,cuda:1")


def named_gpus(device: str) -> list[str]:
    """The GPUs that ``device`` has by number, as torch calls them: "cuda:00" is cuda:0."""
    parts = (part.partition(":") for part in device.split(","))
    return [
        f"cuda:{int(number)}" for name, _, number in parts if name == "cuda" and number.isdigit()
    ]


def has_gpu_file() -> bool:
    """Whether a GPU's driver is there, told without loading anything."""
    return any(os.path.exists(path) for path in _GPU_FILES)


def wants_gpu(device: str) -> bool:
    """Whether ``device`` may mean another one than the native kernels' CPU on this machine."""
    return has_gpu_file() if device == "auto" else device != "cpu"
