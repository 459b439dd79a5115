"""One native call a step (design 3.2): rows of one or many sessions through all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moechat import _native
from moechat.kv.cache import KVCache


@dataclass(frozen=True)
class StepRow:
    """1..k tokens of one session at the end of its cache; how many of the last want logits."""

    cache: KVCache
    ids: Sequence[int]
    num_logits: int = 1


class DecodeStep:
    """Steps of one model on one pool. Used by the decode thread only."""

    def __init__(self, model: _native.Model, pool: _native.ThreadPool) -> None:
        self.model = model
        self.native = _native.DecodeStep(model, pool)

    def run(self, rows: Sequence[StepRow]) -> list[NDArray[np.float32] | None]:
        """Append the rows' KV; logits [num_logits, vocab] of each row, None for 0 of them."""
        native_rows = [
            (row.cache.native, np.array(row.ids, np.int32), len(row.cache), row.num_logits)
            for row in rows
        ]
        outputs = self.native.run(self.model, native_rows)
        return [logits if row.num_logits else None for row, logits in zip(rows, outputs)]
