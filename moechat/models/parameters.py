"""How many parameters a model has, and how many of them compute one token."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from moechat.models.spec import ModelSpec, TensorSpec


@dataclass(frozen=True, slots=True)
class Parameters:
    """``active``: those that one token needs; None for a model without experts."""

    total: int
    active: int | None


def count_parameters(table: Iterable[TensorSpec], spec: ModelSpec) -> Parameters:
    """From a model's tensor table, multi-token-prediction layers left out.

    Of a layer's experts the chosen ones are active; of an embedding that is not also the head, one
    row.
    """
    total = experts = idle = 0
    for tensor in table:
        size = math.prod(tensor.shape)
        total += size
        if ".experts." in tensor.role:
            experts += size
        elif tensor.role == "embedding" and not spec.tied_embeddings:
            idle += size - size // spec.vocab_size
    if spec.moe is None:
        return Parameters(total, None)
    idle += experts - experts * spec.moe.num_experts_per_token // spec.moe.num_experts
    return Parameters(total, total - idle)
