"""The torch devices that a device's name means on this machine."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Sequence
from typing import Any

from moechat.engine.device_names import named_gpus
from moechat.errors import DeviceUnavailable

_INSTALL = "Install it: pip install 'moechat[gpu]'"
_OLDEST = 2, 8  # torch.mm gives float32 of BF16
_AGAIN = "Install torch anew, or use the CPU: --device cpu"


def torch_devices(device: str) -> Sequence[str]:
    """torch's names of the devices that ``device`` means. Imports torch; DeviceUnavailable."""
    if device.startswith("torch-cpu"):
        count = int(device.partition(":")[2] or 1)
        _import_torch()
        return ["cpu"] * count
    torch = _import_torch()
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if found is not None and (int(found[1]), int(found[2])) < _OLDEST:
        raise DeviceUnavailable(
            "a GPU needs a newer torch", f"this is {torch.__version__}, and 2.8 is needed", _INSTALL
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a driver that is too old, say: it is told below
        available = torch.cuda.is_available()
    if not available:
        raise DeviceUnavailable(
            "there is no GPU that torch can use",
            "torch was built without CUDA"
            if torch.version.cuda is None
            else "the driver is missing, too old, or shows no device",
            "Set up torch with CUDA and the driver it needs, or use the CPU: --device cpu",
        )
    count = torch.cuda.device_count()
    if device == "cuda:all":
        return [f"cuda:{number}" for number in range(count)]
    names = named_gpus(device) or ["cuda:0"]
    for name in names:
        if int(name.partition(":")[2]) >= count:
            raise DeviceUnavailable(
                f"there is no {name}", f"this machine has {count}, counted from cuda:0"
            )
    return names


def _import_torch() -> Any:
    """The module; DeviceUnavailable."""
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise DeviceUnavailable(
            "a GPU cannot be used without torch", str(error), _INSTALL
        ) from None
    except Exception as error:  # whatever the libraries that it loads find wrong
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise DeviceUnavailable("torch is here and does not load", why, _AGAIN) from None
