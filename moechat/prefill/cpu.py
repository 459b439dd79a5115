"""Prefill on the CPU's native kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moechat import _native
from moechat.kv.cache import KVCache


@dataclass(frozen=True)
class LayerOutput:
    """What one layer leaves behind. Shapes: T new tokens, W elements a slot, n keys, K experts."""

    kv_TW: NDArray[Any]  # in the cache's own type
    window_mass_n: NDArray[np.float32] | None
    router_ids_TK: NDArray[np.int32]  # [T, 0] for a dense layer


class CpuPrefill:
    """One span of new tokens after the slots that ``cache`` already holds."""

    def __init__(
        self, model: _native.Model, pool: _native.ThreadPool, cache: KVCache, ids: list[int]
    ) -> None:
        tokens = np.array(ids, np.int32)
        self._native = _native.Prefill(model, pool, cache.native, tokens, len(cache))

    def run_layer(self, cancel: _native.CancelFlag, window: int = 0) -> LayerOutput | None:
        """Run the next layer; None when ``cancel`` cut it.

        With ``window`` > 0 also the attention that the last ``window`` tokens give to every key.
        """
        output = self._native.run_layer(cancel, window)
        if output is None:
            return None
        kv_TW, window_mass_n = output
        return LayerOutput(kv_TW, window_mass_n, self._native.router_ids)

    def logits(self, cancel: _native.CancelFlag, first: int) -> NDArray[np.float32] | None:
        """Logits [T - first, vocab] of the tokens from ``first`` on, after the last layer."""
        return self._native.logits(cancel, first)

    @property
    def hidden_TD(self) -> NDArray[np.float32]:
        """The residual stream after the layer that ran last."""
        return self._native.hidden
