"""In which pieces, and in which order, a model's weights come to a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch  # type: ignore[import-not-found, unused-ignore]

from moechat.gpu_weights.stored import ExpertStack, StoredMatrix, StoredWeights, total_bytes
from moechat.prefill.gpu import register
from moechat.prefill.gpu.parcel import Parcel
from moechat.prefill.gpu.ring import LINEARS, Item, Ring
from moechat.prefill.gpu.transfer import Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """``group_bytes``: a slot of the ring; a group has as many experts as go in, one at least.

    ``resident_bytes``: None for all matrices that are no routed experts. ``page_lock_bytes``: None
    for what memory allows, 0 to copy by way of buffers; ``window_bytes`` are locked at once.
    """

    group_bytes: int = 1_500_000_000
    num_slots: int = 3
    resident_bytes: int | None = None
    page_lock_bytes: int | None = None
    window_bytes: int = register.WINDOW_BYTES


@dataclass(frozen=True, slots=True)
class Group:
    """Experts ``first`` ... of a layer; how many is in the parcel."""

    first: int
    item: Item


class StreamPlan:
    """``items`` in order of a pass; ``groups`` of experts and ``linears`` by layer."""

    def __init__(
        self,
        stored: StoredWeights,
        num_layers: int,
        transfer: Transfer,
        device: torch.device,
        settings: StreamSettings,
    ) -> None:
        self._stored, self._num_layers = stored, num_layers
        self._transfer, self._device = transfer, device
        self.groups = self._plan_experts(settings)
        self.linears = self._plan_linears(settings)
        experts = [group.item for layer in self.groups.values() for group in layer]
        self.items = sorted([*experts, *self.linears.values()], key=lambda item: item.key)

    def clear(self) -> None:
        """Let go of the mappings."""
        self._stored = StoredWeights()
        self.groups, self.linears, self.items = {}, {}, []

    def _plan_experts(self, settings: StreamSettings) -> dict[int, list[Group]]:
        parcels = {
            layer: _cut(stack, settings.group_bytes)
            for layer, stack in self._stored.experts.items()
            if layer < self._num_layers
        }
        of_all = [parcel for layer in parcels.values() for _, parcel in layer]
        ring = ring_for(of_all, settings.num_slots, self._transfer, self._device)
        return {
            layer: [
                Group(first, Item((layer, number), parcel, ring))
                for number, (first, parcel) in enumerate(cut)
            ]
            for layer, cut in parcels.items()
        }

    def _plan_linears(self, settings: StreamSettings) -> dict[int, Item]:
        left = settings.resident_bytes
        items: dict[int, Item] = {}
        streamed: dict[int, Parcel] = {}
        for layer in range(self._num_layers):
            matrices = {key: self._stored.matrices[key] for key in self._stored.layer_keys(layer)}
            parcel = Parcel({key: [matrix] for key, matrix in matrices.items()})
            size = total_bytes(matrices)
            if left is None or size <= left:
                left = None if left is None else left - size
                ring = ring_for([parcel], 1, self._transfer, self._device)
                items[layer] = Item((layer, LINEARS), parcel, ring, once=True)
            else:
                streamed[layer] = parcel
        # Two: the next layer's come while one computes.
        ring = ring_for(list(streamed.values()), 2, self._transfer, self._device)
        for layer, parcel in streamed.items():
            items[layer] = Item((layer, LINEARS), parcel, ring)
        return items


def ring_for(
    parcels: Sequence[Parcel], num_slots: int, transfer: Transfer, device: torch.device
) -> Ring:
    """Slots that hold any of the parcels."""
    large = max((parcel.large_bytes for parcel in parcels), default=0)
    small = max((parcel.small_bytes for parcel in parcels), default=0)
    return Ring(transfer, device, num_slots, large, small)


def _cut(stack: ExpertStack, group_bytes: int) -> list[tuple[int, Parcel]]:
    """Groups of experts: the first one's number and what is copied."""
    one: dict[str, StoredMatrix] = {name: part[0] for name, part in stack.parts.items()}
    most = max(1, group_bytes // total_bytes(one))
    size = -(-stack.num_experts // -(-stack.num_experts // most))  # as even as can be
    return [
        (first, Parcel({name: part[first : first + size] for name, part in stack.parts.items()}))
        for first in range(0, stack.num_experts, size)
    ]
