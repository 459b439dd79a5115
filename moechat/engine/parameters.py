"""What an engine refuses of its parameters before anything is loaded."""

from __future__ import annotations

from moechat.engine.device_names import check_device, wants_gpu
from moechat.engine.gpu_experts import check_gpu_experts
from moechat.engine.gpus import check_decode
from moechat.errors import BadParameter


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """BadParameter unless ``value`` is one of the choices."""
    if value not in choices:
        raise BadParameter(
            f"{name} cannot be '{value}'", f"this version knows {' and '.join(choices)}"
        )


def check_at_least(name: str, value: int | None, least: int) -> None:
    """BadParameter if ``value`` is given and less."""
    if value is not None and value < least:
        raise BadParameter(f"{name} cannot be {value}", f"it is {least} or more")


def chosen_context(asked: int | None, trained: int) -> int:
    """Tokens of the context: all that the model was trained for, or fewer. BadParameter."""
    if asked is None:
        return trained
    if not 1 <= asked <= trained:
        raise BadParameter(
            f"a context (--ctx) of {asked} tokens is not possible",
            f"the model was trained for {trained}",
        )
    return asked


def check_devices(
    device: str,
    *,
    compute: str,
    speculate: bool,
    gpu_memory_bytes: int | None,
    gpu_prefill_tokens: int | None,
    gpu_decode: str,
    gpu_experts: int | str,
) -> bool:
    """Whether ``device`` may mean a GPU of this machine.

    BadParameter, or DeviceUnavailable, for what cannot be together with it.
    """
    check_device(device)
    wanted = wants_gpu(device)
    check_choice("gpu_decode", gpu_decode, ("auto", "on", "off"))
    if gpu_decode == "on":
        check_decode(device, wanted, speculate)
    if compute == "w8a8" and not wanted:
        raise BadParameter(
            "compute cannot be 'w8a8'",
            "there is no GPU, or the device is the CPU",
            "Leave it out, or name a GPU: --device cuda",
        )
    check_gpu_experts(gpu_experts, answers=wanted and gpu_decode != "off")
    check_at_least("gpu_memory_bytes", gpu_memory_bytes, 1)
    check_at_least("gpu_prefill_tokens", gpu_prefill_tokens, 0)
    return wanted
