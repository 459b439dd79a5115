"""What decode's products need to know of a weight, and what a row's slots are.

Shapes: N outputs, K inputs, S slabs, C slots of one, W elements of a slot, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import torch  # type: ignore[import-not-found, unused-ignore]


class Fp8Weight(Protocol):
    """FP8 e4m3 codes uint8 [N, K] with a float32 scale a block; ``gpu_weights.weight`` has it."""

    @property
    def codes(self) -> torch.Tensor:
        """uint8 [N, K]."""

    @property
    def scale(self) -> torch.Tensor:
        """float32, one a block."""

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a block."""

    @property
    def first_row(self) -> int:
        """Of the matrix within its grid of scales."""

    def to_dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Codes times scales [N, K]."""


Weight: TypeAlias = "torch.Tensor | Fp8Weight"


class Norm(NamedTuple):
    """Root mean square norm of a whole row. ``weight`` float32 [K]."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True)
class Slots:
    """A layer's slots and where the rows of a step find theirs, all on the device.

    Row r has slab ``slab_R[r]``, sees its slots [begin_R[r], own_R[r]), and its own new one, that
    goes to own_R[r] < C. int32 [R]; ``slots_SCW`` bfloat16, or float32 in exact mode. Rows of one
    session are in the order of their positions.
    """

    slots_SCW: torch.Tensor
    slab_R: torch.Tensor
    begin_R: torch.Tensor
    own_R: torch.Tensor


def shape_of(weight: Weight) -> tuple[int, int]:
    """(N, K)."""
    rows, cols = (weight if isinstance(weight, torch.Tensor) else weight.codes).shape
    return int(rows), int(cols)


def dense(weight: Weight) -> torch.Tensor:
    """float32 [N, K]."""
    if isinstance(weight, torch.Tensor):
        return weight.float()
    return weight.to_dense(torch.float32)


def rounds_inputs(weight: Weight) -> bool:
    """Whether products with it take inputs rounded to bfloat16: all but those of float32."""
    return not isinstance(weight, torch.Tensor) or weight.dtype != torch.float32
