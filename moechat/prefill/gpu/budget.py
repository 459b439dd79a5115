"""How a given amount of device memory is shared between the ring and what stays."""

from __future__ import annotations

from dataclasses import dataclass

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
    parts = _Parts.of(weights, dtype, num_layers)
    sizes, streamed, one, decoded = parts.sizes, parts.streamed, parts.one, parts.one_decoded
    needed = beside_bytes + parts.least
    if memory_bytes < needed:
        raise DoesNotFit(
            "the weights cannot be streamed through this GPU",
            f"{size_text(needed)} are needed, and {size_text(memory_bytes)} are there",
            "Leave it more memory, if --gpu-memory bounds it, or use the CPU: --device cpu",
        )
    left = memory_bytes - beside_bytes - parts.fixed
    if not weights.experts:
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


def least_bytes(weights: StoredWeights, dtype: torch.dtype, *, num_layers: int) -> int:
    """With so much memory ``fit_settings`` finds settings, if only just."""
    return _Parts.of(weights, dtype, num_layers).least


@dataclass(frozen=True)
class _Parts:
    """What has to be there whatever else is, in bytes."""

    fixed: int  # the head, and the largest layer decoded
    sizes: list[int]  # of the layers, less their experts
    one: int  # expert, as stored; 0 without experts
    one_decoded: int

    @classmethod
    def of(cls, weights: StoredWeights, dtype: torch.dtype, num_layers: int) -> _Parts:
        layers = [
            {key: weights.matrices[key] for key in weights.layer_keys(layer)}
            for layer in range(num_layers)
        ]
        head = {key: weights.matrices[key] for key in ("head",) if key in weights.matrices}
        if not head:  # tied: the embedding is multiplied with
            head = {"embedding": weights.matrices["embedding"]}
        experts = [
            {name: part[0] for name, part in stack.parts.items()}
            for stack in weights.experts.values()
        ]
        return cls(
            fixed=total_bytes(head)
            + _decoded_bytes(head, dtype)
            + max(_decoded_bytes(layer, dtype) for layer in layers),
            sizes=[total_bytes(layer) for layer in layers],
            one=max((total_bytes(expert) for expert in experts), default=0),
            one_decoded=max((_decoded_bytes(expert, dtype) for expert in experts), default=0),
        )

    @property
    def streamed(self) -> int:
        """Two layers, where not all stay."""
        return 2 * max(self.sizes)

    @property
    def least(self) -> int:
        """With slots of one expert. Without experts all layers may stay, and none streams."""
        if not self.one:
            return self.fixed + min(self.streamed, sum(self.sizes))
        return self.fixed + self.streamed + MIN_SLOTS * self.one + self.one_decoded


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
