"""What decode's products need to know of a weight, and what a row's slots are.

Shapes: N outputs, K inputs, S slabs, C slots of one, W elements of a slot, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch  # type: ignore[import-not-found, unused-ignore]

from moechat.gpu_weights.weight import Weight


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
    rows, cols = weight.shape
    return int(rows), int(cols)


def dense(weight: Weight) -> torch.Tensor:
    """float32 [N, K]."""
    if isinstance(weight, torch.Tensor):
        return weight.float()
    return weight.to_dense(torch.float32)


def rounds_inputs(weight: Weight) -> bool:
    """Whether products with it take inputs rounded to bfloat16: all but those of float32."""
    return not isinstance(weight, torch.Tensor) or weight.dtype != torch.float32
