"""What ``moechat doctor`` tells of GPUs: those that are here, and what device "auto" takes."""

from __future__ import annotations

import dataclasses
import glob
from typing import Any

from moechat.engine.device_names import has_gpu_file
from moechat.engine.devices import torch_devices
from moechat.errors import MoechatError

_DRIVER_FILES = "/proc/driver/nvidia/gpus/*/information"


def gpu_facts() -> dict[str, Any]:
    """``gpus``, ``auto_device``, and ``why_cpu`` ("" where a GPU is taken).

    torch is imported only where a driver is.
    """
    if not has_gpu_file():
        return {"gpus": [], "auto_device": "cpu", "why_cpu": "there is no GPU"}
    try:
        (first,) = torch_devices("auto")
        from moechat.prefill.gpu.device_errors import named_errors
        from moechat.prefill.gpu.survey import survey

        with named_errors("the GPU's memory is full", "Free some of it"):
            gpus = [dataclasses.asdict(facts) for facts in survey()]
    except MoechatError as error:
        gpus = [{"name": name} for name in driver_names()]
        return {"gpus": gpus, "auto_device": "cpu", "why_cpu": error.message}
    return {"gpus": gpus, "auto_device": first, "why_cpu": ""}


def driver_names() -> list[str]:
    """The GPUs as their driver calls them; nothing where it does not say."""
    names = []
    for path in sorted(glob.glob(_DRIVER_FILES)):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read()
        except OSError:
            continue
        for line in text.splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "Model":
                names.append(value.strip())
    return names
