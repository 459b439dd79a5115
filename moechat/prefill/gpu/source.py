"""Where streamed prefill gets its weights: what the forward pass asks for, and when.

Shapes: D hidden; E experts of a group, I their width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch  # type: ignore[import-not-found, unused-ignore]

from moechat.gpu_weights.weight import Weight


@dataclass(frozen=True)
class ExpertGroup:
    """Consecutive experts of one layer, from number ``first`` on.

    ``gate`` and ``up`` [E, I, D] and ``down`` [E, D, I] in the source's dtype, or FP8 as stored;
    biases float32 [E, I] and [E, D], or None when the model has none.
    """

    first: int
    gate: Weight
    up: Weight
    down: Weight
    gate_bias: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


class LayerSource(Protocol):
    """A model's weights by role (docs/adding-a-model.md), layer after layer.

    ``dtype`` is that of matrix inputs: bfloat16, or float32 in exact mode. It may run ahead by
    itself: begin(layer) only tells that its copies may start.
    """

    @property
    def device(self) -> torch.device:
        """Where all tensors are."""

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16, or float32."""

    def vector(self, role: str) -> torch.Tensor | None:
        """float32 [n]; None when the model has none of this role."""

    def matrix(self, role: str) -> Weight | None:
        """[outputs, inputs] in ``dtype``, valid until its layer is released; None: it has none.

        FP8 may come as stored where ``dtype`` is bfloat16, but for the embedding.
        Routers, shared gates and the embedding are not inputs of a BF16 product: they may come in
        float32 where the checkpoint stores more than BF16 holds.
        """

    def expert_groups(self, layer: int) -> Iterator[ExpertGroup]:
        """All experts of a layer in their order; a group is valid until the next is asked for."""

    def begin(self, layer: int) -> None:
        """The layer is about to be computed."""

    def release(self, layer: int) -> None:
        """The layer has been computed, or was cut; its tensors may go."""


def needed(source: LayerSource, role: str) -> Weight:
    """A matrix that the model must have. LookupError without it: the source is another model's."""
    matrix = source.matrix(role)
    if matrix is None:
        raise LookupError(f"the source has no matrix for the role {role}")
    return matrix


def needed_dense(source: LayerSource, role: str) -> torch.Tensor:
    """The same of a matrix that is no input of a BF16 product: a router, a gate, the embedding."""
    matrix = needed(source, role)
    assert isinstance(matrix, torch.Tensor)
    return matrix
