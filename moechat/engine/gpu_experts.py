"""How many routed experts of a layer decode's GPU holds, beside what reading prompts needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from moechat.engine.gpu_room import GpuRoom
from moechat.engine.loading import LoadedModel
from moechat.errors import BadParameter, DoesNotFit

if TYPE_CHECKING:
    from moechat.decode.gpu.hybrid_loop import HybridDecode
    from moechat.prefill.gpu.plan import StreamSettings

    Plan = tuple[int, StreamSettings] | None  # the longest span and the stream; None: no room


def check_gpu_experts(wanted: int | str, *, answers: bool) -> None:
    """BadParameter unless it is "auto" or a number, 0 if no GPU takes part in ``answers``."""
    if wanted == "auto":
        return
    if isinstance(wanted, str) or wanted < 0:
        raise BadParameter(f"gpu_experts cannot be {wanted}", "it is 0 or more, or auto")
    if wanted and not answers:
        raise BadParameter(
            f"gpu_experts cannot be {wanted}",
            "a GPU holds experts for answers that it takes part in, and none does",
            "Leave it out, or name a GPU: --device cuda --gpu-decode on",
        )


def unused_notice(wanted: int | str) -> str:
    """What a user should know who asked for held experts of a GPU that only reads prompts."""
    if wanted in (0, "auto"):
        return ""
    return "no experts are kept on a GPU: none takes part in answers (see --gpu-decode)"


def hold_experts(
    steps: HybridDecode,
    wanted: int | str,
    model: LoadedModel,
    room: GpuRoom,
    *,
    compute: str,
    context_tokens: int,
) -> int:
    """Have decode's GPU hold ``experts_to_hold``; the bytes that they take there.

    "auto" is content with fewer where torch finds less memory than there should be.
    """
    number = experts_to_hold(wanted, model, room, compute=compute, context_tokens=context_tokens)
    while number:
        try:
            return steps.hold_experts(number)
        except DoesNotFit:
            if wanted != "auto":
                raise
            number //= 2
    return 0


def experts_to_hold(
    wanted: int | str,
    model: LoadedModel,
    room: GpuRoom,
    *,
    compute: str,
    context_tokens: int,
) -> int:
    """``wanted`` of each layer; for "auto" as many as leave the reading of prompts as it is.

    That is: spans as long, and as much memory for the weights that stream, spare slots apart.
    Where the memory has no limit "auto" is none. Raises BadParameter where experts cannot be held,
    DoesNotFit; not for "auto".
    """
    if wanted == 0 or (wanted == "auto" and room.memory_bytes is None):
        return 0
    from moechat.decode.gpu.hot_experts import bytes_of_one_each
    from moechat.gpu_weights.stored import StoredWeights
    from moechat.prefill.gpu.gpu_prefill import CHUNK_TOKENS
    from moechat.prefill.gpu.stream_plan import share_memory

    moe = model.spec.moe
    most = 0 if moe is None else moe.num_experts
    weights = StoredWeights.of(model.tensors)
    try:
        one_bytes = bytes_of_one_each(weights, compute)
    except BadParameter:
        if wanted == "auto":
            return 0
        raise

    def plan(number: int) -> Plan:
        """With so many experts held."""
        left_bytes = room.prompt_bytes(decode=True, held_bytes=number * one_bytes)
        assert left_bytes is not None
        try:
            return share_memory(
                model.spec,
                weights,
                compute=compute,
                memory_bytes=left_bytes,
                context_tokens=context_tokens,
                chunk_tokens=CHUNK_TOKENS,
            )
        except DoesNotFit:
            return None

    if wanted == "auto":
        without = plan(0)
        return _most(most, lambda number: _as_good(plan(number), without))
    number = int(wanted)
    if number > most:
        raise BadParameter(
            f"{number} experts a layer cannot be held on the GPU",
            f"the model has {most}" if most else "the model has no routed experts",
            f"--gpu-experts may be up to {most}" if most else "Leave out --gpu-experts",
        )
    room.check_experts(number, one_bytes)
    return number


def _as_good(plan: Plan, without: Plan) -> bool:
    """Whether prompts are read as if no experts were held; slots beyond the usual number apart."""
    from moechat.prefill.gpu.budget import USUAL_SLOTS

    if plan is None or without is None:
        return False
    (tokens, ours), (tokens_without, theirs) = plan, without
    return (
        tokens == tokens_without
        and (ours.group_bytes, ours.resident_bytes) == (theirs.group_bytes, theirs.resident_bytes)
        and ours.num_slots >= min(theirs.num_slots, USUAL_SLOTS)
    )


def _most(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to ``limit`` that fits; all below one that does fit as well, 0 too."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
