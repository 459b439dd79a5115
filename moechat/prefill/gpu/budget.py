"""How a given amount of device memory is shared between the ring and what stays."""

from __future__ import annotations

import torch  # type: ignore[import-not-found, unused-ignore]

from moechat.errors import DoesNotFit
from moechat.gpu_weights.decode import is_view, stays_stored
from moechat.gpu_weights.stored import StoredMatrix, StoredWeights, total_bytes
from moechat.prefill.gpu.plan import StreamSettings
from moechat.sizes import size_text

MIN_SLOTS, USUAL_SLOTS, MAX_SLOTS = 2, 6, 8
# Beyond that a group's products gain nothing, and the first one comes later.
MAX_GROUP_BYTES = 1_500_000_000


def fit_settings(
    weights: StoredWeights,
    dtype: torch.dtype,
    memory_bytes: int,
    *,
    num_layers: int,
    beside_bytes: int = 0,
) -> StreamSettings:
    """Settings with which the weights take at most ``memory_bytes`` of a device.

    Less ``beside_bytes``, which are a prompt's.

    The head and the largest layer, decoded, come first. Then the ring: six slots, so that copies go
    on over a long prompt's attention, in half of what is left at most; what then is left keeps
    matrices on the device; what still is left makes more slots. A pass needs ``activation_bytes``
    beside them. Raises DoesNotFit when two slots of one expert do not fit, or no two layers.
    """
    layers = [
        {key: weights.matrices[key] for key in weights.layer_keys(layer)}
        for layer in range(num_layers)
    ]
    head = {key: weights.matrices[key] for key in ("head",) if key in weights.matrices}
    if not head:  # tied: the embedding is multiplied with
        head = {"embedding": weights.matrices["embedding"]}
    fixed = total_bytes(head) + _decoded_bytes(head, dtype)
    fixed += max(_decoded_bytes(layer, dtype) for layer in layers)
    sizes = [total_bytes(layer) for layer in layers]
    streamed = 2 * max(sizes)  # where not all stay
    left = memory_bytes - beside_bytes - fixed
    experts = [
        {name: part[0] for name, part in stack.parts.items()} for stack in weights.experts.values()
    ]
    one = max((total_bytes(expert) for expert in experts), default=0)
    decoded = max((_decoded_bytes(expert, dtype) for expert in experts), default=0)
    # Without experts all layers may stay, and nothing is streamed.
    least = min(streamed, sum(sizes)) if not experts else streamed + MIN_SLOTS * one + decoded
    if left < least:
        raise DoesNotFit(
            "the weights cannot be streamed through this GPU",
            f"{size_text(memory_bytes)} of its memory may be taken, "
            f"and {size_text(memory_bytes - left + least)} are needed",
            "Leave it more memory, if --gpu-memory bounds it, or use the CPU: --device cpu",
        )
    if not experts:
        resident = left if sum(sizes) <= left else left - streamed
        return StreamSettings(resident_bytes=resident)
    num_slots = USUAL_SLOTS
    size = min((left - streamed) // 2 // (num_slots * one + decoded), MAX_GROUP_BYTES // one)
    size = min(size, max(stack.num_experts for stack in weights.experts.values()))
    if size < 1:
        size, num_slots = 1, MIN_SLOTS
    left -= size * (num_slots * one + decoded)
    if sum(sizes) > left:
        return StreamSettings(
            group_bytes=size * one, num_slots=num_slots, resident_bytes=max(0, left - streamed)
        )
    more = (left - sum(sizes)) // (size * one)
    return StreamSettings(group_bytes=size * one, num_slots=min(MAX_SLOTS, num_slots + more))


def _decoded_bytes(matrices: dict[str, StoredMatrix], dtype: torch.dtype) -> int:
    """Of what ``weight_of`` makes of them beside the stored bytes."""
    return sum(
        matrix.layout.rows * matrix.layout.cols * dtype.itemsize
        for key, matrix in matrices.items()
        if not _as_stored(key, matrix, dtype)
    )


def _as_stored(key: str, matrix: StoredMatrix, dtype: torch.dtype) -> bool:
    """Codes of which every other row is wanted are decoded."""
    halves = key.endswith("gate_up")
    return (is_view if halves else stays_stored)(matrix.layout, dtype)
