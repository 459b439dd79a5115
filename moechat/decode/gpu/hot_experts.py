"""Some routed experts of each layer on the device: the CPU's server leaves them out.

Which ones is exchanged between steps, in small parts; their memory stays where it is, since graphs
hold its addresses. Shapes: R rows, k experts a token, H experts held of a layer, E in all, D
hidden, I width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch  # type: ignore[import-not-found, unused-ignore]
from numpy.typing import NDArray

from moechat.decode.gpu.expert_slots import ExpertSlots, check_holdable, expert_bytes
from moechat.decode.gpu.host_pieces import HostPieces
from moechat.decode.gpu.weight_views import dense, rounds_inputs
from moechat.errors import DoesNotFit
from moechat.gpu_weights.activation import activate
from moechat.gpu_weights.kernels import has_kernels
from moechat.gpu_weights.stored import StoredWeights
from moechat.gpu_weights.weight import Weight
from moechat.models.spec import ModelSpec

Uses = NDArray[np.int64]  # [E]: how often a prompt's tokens were sent to each expert of a layer
_NOBODY = -1  # in a slot that holds no expert, and as the place of an expert that is not held


@dataclass(frozen=True)
class HotLayer:
    """``place_E`` int32: where an expert is among those held, or -1. ``gate`` and ``up``
    [H, I, D], ``down`` [H, D, I].
    """

    place_E: torch.Tensor
    gate: Weight
    up: Weight
    down: Weight


@dataclass(frozen=True)
class _Move:
    uses: int  # of the expert that comes
    layer: int
    slot: int
    expert: int


class HotExperts:
    """Room for ``count`` experts of every MoE layer, which nobody has at first.

    ``changed(layer, ids)`` is told whenever the experts are others that the device computes.
    Raises BadParameter where experts cannot be held, and DoesNotFit.
    """

    def __init__(
        self,
        spec: ModelSpec,
        stored: StoredWeights,
        count: int,
        *,
        device: torch.device,
        compute: str,
        changed: Callable[[int, Sequence[int]], None],
    ) -> None:
        self._spec, self._compute, self._changed = spec, compute, changed
        self.count, self.num_bytes = count, count * bytes_of_one_each(stored, compute)
        self._pieces = HostPieces(device)
        self._moves: Iterator[None] | None = None
        self._held = {layer: [_NOBODY] * count for layer in stored.experts}
        self._slots: dict[int, ExpertSlots] = {}
        self.layers: dict[int, HotLayer] = {}
        try:
            for layer, stack in stored.experts.items():
                slots = ExpertSlots(stack, count, device=device, compute=compute)
                place_E = torch.full((stack.num_experts,), _NOBODY, dtype=torch.int32)
                held = HotLayer(place_E.to(device), slots.gate, slots.up, slots.down)
                self._slots[layer], self.layers[layer] = slots, held
        except torch.OutOfMemoryError as error:
            raise DoesNotFit(
                f"{count} experts a layer do not fit the GPU's memory",
                str(error).splitlines()[0],
                "Lower --gpu-experts",
            ) from None

    @property
    def num_held(self) -> int:
        """Of a layer, on average, rounded down. From any thread."""
        held = sum(len(slots) - slots.count(_NOBODY) for slots in list(self._held.values()))
        return held // len(self._held)

    @property
    def exchanging(self) -> bool:
        """Whether there is something left for ``advance``."""
        return self._moves is not None

    def want(self, uses: Mapping[int, Uses]) -> None:
        """From now on, those that were used most, by layer; what is not asked for is as it was."""
        moves: list[_Move] = []
        for layer, uses_E in uses.items():
            slots = self._held[layer]
            wanted = most_used(uses_E, self.count, slots)
            free = [slot for slot, expert in enumerate(slots) if expert not in wanted]
            missing = [expert for expert in wanted if expert not in slots]
            # An empty slot, or else that of the least useful one.
            free.sort(key=lambda slot: 0 if slots[slot] == _NOBODY else 1 + uses_E[slots[slot]])
            for slot, expert in zip(free, missing):
                moves.append(_Move(int(uses_E[expert]), layer, slot, expert))
        moves.sort(key=lambda move: -move.uses)  # the most useful ones first
        self._moves = self._exchange(moves) if moves else None

    def advance(self, seconds: float | None = None) -> None:
        """Exchange for about so long, one piece at least; None: all. No step is under way."""
        if self._moves is None:
            return
        end = None if seconds is None else time.monotonic() + seconds
        try:
            with self._pieces.copying():
                for _ in self._moves:
                    if end is not None and time.monotonic() >= end:
                        return
        except torch.OutOfMemoryError:  # of what decoding takes in between: so be it
            pass
        self._moves = None

    def add(
        self,
        layer: int,
        x_RD: torch.Tensor,
        ids_Rk: torch.Tensor,
        weights_Rk: torch.Tensor,
        base_RD: torch.Tensor,
    ) -> torch.Tensor:
        """base + the weighted sums of the held experts, in slot order; x is normed."""
        held = self.layers.get(layer)
        if held is None:
            return base_RD
        if has_kernels(x_RD.device.type):
            from moechat.decode.gpu import triton_hot

            rounds = self._rounds(held)
            return triton_hot.add(self._spec, held, x_RD, ids_Rk, weights_Rk, base_RD, rounds)
        return self._plain(held, x_RD, ids_Rk, weights_Rk, base_RD)

    def _exchange(self, moves: Sequence[_Move]) -> Iterator[None]:
        """A stop after each piece; the expert under way is nobody's on the device meanwhile."""
        for move in moves:
            self._put(move.layer, move.slot, _NOBODY)
            yield from self._slots[move.layer].fill(move.slot, move.expert, self._pieces)
            self._put(move.layer, move.slot, move.expert)
            yield

    def _put(self, layer: int, slot: int, expert: int) -> None:
        slots, place_E = self._held[layer], self.layers[layer].place_E
        before, slots[slot] = slots[slot], expert
        if before != _NOBODY:
            place_E[before : before + 1].fill_(_NOBODY)
        if expert != _NOBODY:
            place_E[expert : expert + 1].fill_(slot)
        if before != expert:
            self._changed(layer, [held for held in slots if held != _NOBODY])

    def _plain(
        self,
        held: HotLayer,
        x_RD: torch.Tensor,
        ids_Rk: torch.Tensor,
        weights_Rk: torch.Tensor,
        base_RD: torch.Tensor,
    ) -> torch.Tensor:
        rounds, out_RD = self._rounds(held), base_RD.clone()

        def rounded(x: torch.Tensor) -> torch.Tensor:
            return x.bfloat16().float() if rounds else x

        for row, ids in enumerate(ids_Rk.tolist()):
            x_D, sum_D = rounded(x_RD[row]), torch.zeros_like(x_RD[row])
            for slot, expert in enumerate(ids):
                place = int(held.place_E[expert])
                if place < 0:
                    continue
                gate, up, down = (dense(part[place]) for part in (held.gate, held.up, held.down))
                inner_I = activate(self._spec, gate @ x_D, up @ x_D)
                sum_D += weights_Rk[row, slot] * (down @ rounded(inner_I))
            out_RD[row] += sum_D
        return out_RD

    def _rounds(self, held: HotLayer) -> bool:
        """Whether products take inputs rounded to bfloat16, as those of ops.linear."""
        return self._compute != "exact" and rounds_inputs(held.gate)


def bytes_of_one_each(stored: StoredWeights, compute: str) -> int:
    """On the device, of one expert of every MoE layer. BadParameter where they cannot be held."""
    for stack in stored.experts.values():
        check_holdable(stack)
    return sum(expert_bytes(stack, compute) for stack in stored.experts.values())


def most_used(uses_E: Uses, count: int, held: Collection[int] = ()) -> list[int]:
    """The ``count`` experts that were used most, in this order.

    Ties go to those that are held, then to the lower number.
    """

    def rank(expert: int) -> tuple[int, bool, int]:
        return -int(uses_E[expert]), expert not in held, expert

    return sorted(range(len(uses_E)), key=rank)[:count]
