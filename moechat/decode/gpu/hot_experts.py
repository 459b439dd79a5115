"""Some routed experts of each layer on the device: the CPU's server leaves them out.

Shapes: R rows, k experts a token, H experts held of a layer, E in all, D hidden, I width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch  # type: ignore[import-not-found, unused-ignore]
from numpy.typing import NDArray

from moechat.decode.gpu.weight_views import dense, rounds_inputs
from moechat.errors import BadParameter
from moechat.gpu_weights.activation import activate
from moechat.gpu_weights.decode import weight_of
from moechat.gpu_weights.kernels import has_kernels
from moechat.gpu_weights.stored import StoredMatrix, StoredWeights
from moechat.gpu_weights.weight import Fp8Matrix, Weight
from moechat.models.spec import ModelSpec

_TILE_INPUTS = 128  # of the kernels


@dataclass(frozen=True)
class HotLayer:
    """``place_E`` int32: where an expert is among those held, or -1. ``gate`` and ``up``
    [H, I, D], ``down`` [H, D, I].
    """

    place_E: torch.Tensor
    gate: Weight
    up: Weight
    down: Weight


class HotExperts:
    """By layer, the experts ``ids``. BadParameter where experts have biases, or lie interleaved."""

    def __init__(
        self,
        spec: ModelSpec,
        stored: StoredWeights,
        ids: Mapping[int, Sequence[int]],
        *,
        device: torch.device,
        compute: str,
    ) -> None:
        self._spec, self._device, self._compute = spec, device, compute
        self.layers = {
            layer: self._load(stored, layer, chosen) for layer, chosen in ids.items() if chosen
        }

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

    def _load(self, stored: StoredWeights, layer: int, chosen: Sequence[int]) -> HotLayer:
        stack = stored.experts[layer]
        if stack.biases or "gate" not in stack.parts:
            raise BadParameter(
                "experts of this model cannot be held on the GPU",
                "they have biases, or gate and up are one matrix",
            )
        place_E = torch.full((stack.num_experts,), -1, dtype=torch.int32)
        place_E[torch.tensor(chosen)] = torch.arange(len(chosen), dtype=torch.int32)
        gate, up, down = (
            self._stack([stack.parts[name][expert] for expert in chosen])
            for name in ("gate", "up", "down")
        )
        return HotLayer(place_E.to(self._device), gate, up, down)

    def _stack(self, matrices: Sequence[StoredMatrix]) -> Weight:
        layout = matrices[0].layout
        exact = self._compute == "exact" or layout.format in ("f32", "f16")
        data = torch.from_numpy(np.stack([matrix.data for matrix in matrices])).to(self._device)
        scales = [matrix.scale for matrix in matrices if matrix.scale is not None]
        scale = torch.from_numpy(np.stack(scales)).to(self._device) if scales else None
        dtype = torch.float32 if exact else torch.bfloat16
        weight = weight_of(layout, data, scale, dtype)
        if isinstance(weight, Fp8Matrix) and weight.block[1] % _TILE_INPUTS:
            return weight.to_dense(torch.bfloat16)  # kernels scale whole tiles
        return weight if isinstance(weight, Fp8Matrix) else weight.contiguous()


def most_used(
    router_ids_TK: NDArray[np.int32], num_experts: int, count: int, first: Sequence[int] = ()
) -> list[int]:
    """The ``count`` experts that a prompt's tokens went to most in one layer, in order of number.

    Ties to the lower number; ``first`` come before all others.
    """
    uses_E = np.bincount(router_ids_TK.ravel(), minlength=num_experts).astype(np.int64)
    uses_E[list(first)] = np.iinfo(np.int64).max
    return sorted(np.argsort(-uses_E, kind="stable")[:count].tolist())
