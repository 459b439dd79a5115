"""What stream-loading prefill asks of whatever brings the weights to its device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch  # type: ignore[import-not-found, unused-ignore]


@dataclass(frozen=True)
class ExpertGroup:
    """Experts ``first`` ... of one layer, E of them, on the device.

    ``gate`` and ``up`` [E, I, D], ``down`` [E, D, I] in the source's dtype; rows may stand apart,
    elements of a row do not. Biases are float32 [E, outputs], or None when the model has none.
    """

    first: int
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    gate_bias: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


class LayerSource(Protocol):
    """Weights by role (docs/adding-a-model.md), as the forward pass goes through the layers."""

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""

    @property
    def dtype(self) -> torch.dtype:
        """Of matrix inputs: bfloat16, or float32 in exact mode."""

    def vector(self, role: str) -> torch.Tensor | None:
        """float32 [n]; None when the model has none."""

    def matrix(self, role: str) -> torch.Tensor | None:
        """[outputs, inputs] in dtype; routers float32. A layer's is valid until its release."""

    def expert_groups(self, layer: int) -> Iterator[ExpertGroup]:
        """In order of experts. A group is valid until the next one is asked for."""

    def begin(self, layer: int) -> None:
        """The layer's copies may start; the source runs ahead by itself."""

    def release(self, layer: int) -> None:
        """The layer's matrices are not used any more."""
