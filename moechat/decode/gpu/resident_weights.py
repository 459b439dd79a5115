"""All weights of a model but its routed experts, on a torch device for decode.

FP8 stays codes and scales, BF16 and float32 stay as they are; other formats are decoded once. Rows
of the embedding are taken on the host. Shapes: N outputs, K inputs, R rows, D hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch  # type: ignore[import-not-found, unused-ignore]
from numpy.typing import NDArray

from moechat.gpu_weights.decode import decode, stays_stored, weight_of
from moechat.gpu_weights.stored import StoredMatrix, StoredWeights
from moechat.gpu_weights.weight import Fp8Matrix, Weight
from moechat.models.spec import BoundTensor, LatentAttention, ModelSpec

_FLOAT32_ROLES = ("router", "shared_gate")  # the CPU computes these in float32 in both modes


@dataclass(frozen=True)
class Linear:
    """A linear layer: ``weight`` [N, K], ``bias`` float32 [N] or None."""

    weight: Weight
    bias: torch.Tensor | None


class ResidentWeights:
    """Weights by role (docs/adding-a-model.md). BadParameter for formats that no GPU path reads."""

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Iterable[BoundTensor],
        *,
        device: torch.device,
        compute: str,
    ) -> None:
        self.spec, self.device, self.compute = spec, device, compute
        self.stored = StoredWeights.of(tensors)
        self._vectors = {
            role: torch.from_numpy(values).to(device)
            for role, values in self.stored.vectors.items()
        }
        self._matrices: dict[str, Weight] = {}
        self._linears: dict[tuple[str, ...], Linear | None] = {}
        joined: set[str] = set()
        for layer in range(spec.num_layers):
            for roles in self._siblings(f"layers.{layer}."):
                self._join(roles)
                joined.update(roles)
        for role, half in self.stored.roles.items():
            if role in joined or (role == "embedding" and "head" in self.stored.roles):
                continue
            self._matrices[role] = self._load(self.stored.matrices[half.key], role, half.first)

    def vector(self, role: str) -> torch.Tensor | None:
        """float32 [n]; None when the model has none."""
        return self._vectors.get(role)

    def linear(self, *roles: str) -> Linear | None:
        """One matrix, or several of the same inputs, their outputs one after another.

        None when there is no such matrix, or these were not joined.
        """
        if roles not in self._linears:
            self._linears[roles] = self._find_linear(roles)
        return self._linears[roles]

    def outputs(self, roles: Sequence[str]) -> list[int]:
        """How many outputs each of some matrices has."""
        halves = [self.stored.roles[role] for role in roles]
        counts = [self.stored.matrices[half.key].layout.outputs for half in halves]
        return [count if h.first is None else count // 2 for count, h in zip(counts, halves)]

    def head(self) -> Weight:
        """[vocabulary, D]; the embedding where they are tied."""
        return self._matrices["head" if "head" in self._matrices else "embedding"]

    def embed(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Rows of the embedding [R, D] in host memory, scaled."""
        half = self.stored.roles["embedding"]
        stored = self.stored.matrices[half.key]
        if stored.scale is not None or stored.layout.transposed:
            weight = self._matrices["embedding"]
            table = weight.to_dense(torch.float32) if isinstance(weight, Fp8Matrix) else weight
            rows_RD: torch.Tensor = table[torch.tensor(ids, device=self.device)].float().cpu()
        else:
            rows = stored.data.reshape(stored.layout.rows, -1)[np.array(ids)]
            layout = dataclasses.replace(stored.layout, rows=len(ids))
            data = torch.from_numpy(rows.reshape(1, -1))
            rows_RD = decode(layout, data, None, torch.float32)[0]
        values: NDArray[np.float32] = rows_RD.numpy() * np.float32(self.spec.embedding_scale)
        return values

    @property
    def num_bytes(self) -> int:
        """On the device."""
        total = 0
        for weight in (*self._matrices.values(), *self._vectors.values()):
            parts = (weight.codes, weight.scale) if isinstance(weight, Fp8Matrix) else (weight,)
            total += sum(part.numel() * part.element_size() for part in parts)
        return total

    def _find_linear(self, roles: tuple[str, ...]) -> Linear | None:
        weight = self._matrices.get("+".join(roles))
        if weight is None:
            return None
        biases = [self.vector(f"{role}_bias") for role in roles]
        if all(bias is None for bias in biases):
            return Linear(weight, None)
        counts = self.outputs(roles)
        zeros = [torch.zeros(count, device=self.device) for count in counts]
        return Linear(weight, torch.cat([z if b is None else b for b, z in zip(biases, zeros)]))

    def _siblings(self, role: str) -> list[tuple[str, ...]]:
        """Matrices that multiply the same inputs at the same time."""
        attention: tuple[str, ...]
        if isinstance(self.spec.attention, LatentAttention):
            attention = ("q_a" if self.spec.attention.q_lora_rank else "q", "kv_a")
        else:
            attention = ("q", "k", "v")
        groups = [attention, ("gate", "up"), ("shared.gate", "shared.up")]
        found = [tuple(role + part for part in group) for group in groups]
        return [group for group in found if all(part in self.stored.roles for part in group)]

    def _join(self, roles: tuple[str, ...]) -> None:
        weights = []
        for role in roles:
            half = self.stored.roles[role]
            weights.append(self._load(self.stored.matrices[half.key], role, half.first))
        joined = _joined(weights)
        if joined is None:
            self._matrices.update(zip(roles, weights))
        else:
            self._matrices["+".join(roles)] = joined

    def _load(self, stored: StoredMatrix, role: str, first: int | None) -> Weight:
        dtype = _dtype(stored, role, self.compute)
        data, scale = self._upload(stored.data), None
        if stored.scale is not None:
            scale = self._upload(stored.scale)
        weight = weight_of(stored.layout, data, scale, dtype)[0]
        if first is not None:
            if isinstance(weight, Fp8Matrix):
                weight = weight.to_dense(torch.bfloat16)
            weight = weight[first::2]
        return weight if isinstance(weight, Fp8Matrix) else weight.contiguous()

    def _upload(self, values: NDArray[np.uint8]) -> torch.Tensor:
        return torch.from_numpy(np.array(values)[None]).to(self.device)


def resident_bytes(stored: StoredWeights, compute: str) -> int:
    """What ``ResidentWeights`` of these takes of its device."""
    total = sum(values.nbytes for values in stored.vectors.values())
    for role, half in stored.roles.items():
        if role == "embedding" and "head" in stored.roles:
            continue
        matrix = stored.matrices[half.key]
        layout, dtype = matrix.layout, _dtype(matrix, role, compute)
        if half.first is None and layout.format == "fp8" and stays_stored(layout, dtype):
            total += layout.rows * layout.cols + 4 * layout.grid[0] * layout.grid[1]
        else:
            count = 1 if half.first is None else 2
            total += layout.rows * layout.cols * dtype.itemsize // count
    return total


def _dtype(stored: StoredMatrix, role: str, compute: str) -> torch.dtype:
    exact = compute == "exact" or role.rsplit(".", 1)[-1] in _FLOAT32_ROLES
    exact = exact or stored.layout.format in ("f32", "f16")
    return torch.float32 if exact else torch.bfloat16


def _joined(weights: list[Weight]) -> Weight | None:
    """One matrix of all outputs; None where their kinds differ, or FP8 blocks would straddle."""
    tensors = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    if len(tensors) == len(weights):
        same = len({tensor.dtype for tensor in tensors}) == 1
        return torch.cat(tensors) if same else None
    codes = [weight for weight in weights if isinstance(weight, Fp8Matrix)]
    if len(codes) < len(weights) or len({weight.block for weight in codes}) > 1:
        return None
    block = codes[0].block
    if any(len(weight) % block[0] for weight in codes[:-1]):
        return None
    return Fp8Matrix(
        torch.cat([weight.codes for weight in codes]),
        torch.cat([weight.scale for weight in codes]),
        block,
    )
