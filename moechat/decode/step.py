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
    """1..k tokens of one session at the end of its cache; logits of the last one if wanted."""

    cache: KVCache
    ids: Sequence[int]
    logits: bool = True


class DecodeStep:
    """Steps of one model on one pool. Used by the decode thread only."""

    def __init__(self, model: _native.Model, pool: _native.ThreadPool) -> None:
        self.model = model
        self.native = _native.DecodeStep(model, pool)

    def run(self, rows: Sequence[StepRow]) -> list[NDArray[np.float32] | None]:
        """Append the rows' KV; logits [vocab] for each row that wants them."""
        native_rows = [
            (row.cache.native, np.array(row.ids, np.int32), len(row.cache), row.logits)
            for row in rows
        ]
        outputs = self.native.run(self.model, native_rows)
        return [logits if row.logits else None for row, logits in zip(rows, outputs)]
