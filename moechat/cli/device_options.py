"""The options that choose where prompts are read, shared by the verbs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from moechat.engine.device_names import check_device
from moechat.errors import BadParameter


def device_name(text: str) -> str:
    """The name of a device as given; a usage error where it is none."""
    try:
        check_device(text)
    except BadParameter as error:
        raise typer.BadParameter(f"{text[:40]!a} is no device; allowed: {error.why}") from None
    return text


# What is of no use without a GPU, by the names that Engine.open has for it.
_GPU_ONLY = {
    "gpu_memory_bytes": "--gpu-memory",
    "gpu_prefill_tokens": "--gpu-prefill-tokens",
    "gpu_experts": "--gpu-experts",
}


def idle_options(settings: Mapping[str, Any], *, has_gpu: bool) -> str:
    """Which of the options that were given do nothing, and why; "" for none.

    ``settings``: those of Engine.open that were given.
    """
    idle = [option for name, option in _GPU_ONLY.items() if name in settings]
    if has_gpu or not idle:
        return ""
    verb = "does" if len(idle) == 1 else "do"
    return f"{' and '.join(idle)} {verb} nothing: no GPU is used (--device {settings['device']})"


DEVICE_METAVAR = "cpu|auto|cuda[:N,...]"
_UNIT_BYTES = {"MB": 10**6, "GB": 10**9, "MiB": 1 << 20, "GiB": 1 << 30}


def _memory(text: Any) -> int:
    allowed = "a number and MB, GB, MiB or GiB, as 20GB or 24GiB"
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([MG]i?B)", str(text), re.ASCII)
    num_bytes = int(float(match[1]) * _UNIT_BYTES[match[2]]) if match else 0
    if num_bytes < 1:
        raise typer.BadParameter(f"{str(text)[:40]!a} is no amount of memory; allowed: {allowed}")
    return num_bytes


def _tokens(text: Any) -> int:
    allowed = "a whole number, 0 or more"
    if not re.fullmatch(r"\d{1,9}", str(text), re.ASCII):
        raise typer.BadParameter(f"{str(text)[:40]!a} is out of range; allowed: {allowed}")
    return int(text)


def _experts(text: Any) -> int | str:
    allowed = "a whole number, 0 or more, or auto"
    if str(text) == "auto":
        return "auto"
    if not re.fullmatch(r"\d{1,6}", str(text), re.ASCII):
        raise typer.BadParameter(f"{str(text)[:40]!a} is out of range; allowed: {allowed}")
    return int(text)


def _on_or_off(text: str) -> str:
    if text not in ("auto", "on", "off"):
        raise typer.BadParameter(f"{text[:40]!a} is not one of auto, on, off")
    return text


Device = Annotated[
    str,
    typer.Option(
        "--device",
        parser=device_name,
        metavar=DEVICE_METAVAR,
        help="What reads long prompts: cpu; cuda, the first GPU; cuda:1; several, as cuda:0,cuda:1 "
        "or cuda:all; or auto: a GPU that torch can use, unless the model is small.",
    ),
]
GpuMemory = Annotated[
    int | None,
    typer.Option(
        "--gpu-memory",
        parser=_memory,
        metavar="SIZE",
        help="What may be taken of each GPU's memory, as 20GB. Default: what is free.",
        show_default=False,
    ),
]
GpuPrefillTokens = Annotated[
    int | None,
    typer.Option(
        "--gpu-prefill-tokens",
        parser=_tokens,
        metavar="N",
        help="The GPU reads prompts of N new tokens or more; 0: all. Default: those that it reads "
        "sooner, as far as that was measured.",
        show_default=False,
    ),
]
GpuDecode = Annotated[
    str,
    typer.Option(
        "--gpu-decode",
        parser=_on_or_off,
        metavar="auto|on|off",
        help="Whether the first GPU of --device takes part in writing answers, too: all but the "
        "routed experts is computed there. auto: where it has room for it.",
    ),
]
GpuExperts = Annotated[
    Any,
    typer.Option(
        "--gpu-experts",
        parser=_experts,
        metavar="N|auto",
        help="How many routed experts of each layer that GPU holds in its memory while it writes "
        "answers: those that the last prompt it read used most. auto: what reading prompts "
        "leaves room for. Default: 0.",
        show_default=False,
    ),
]
