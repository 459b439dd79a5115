"""Prefill on the CPU's native kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moechat import _native
from moechat.kv.cache import KVCache
from moechat.prefill.span import LayerOutput as LayerOutput
from moechat.prefill.span import SpanFigures


class CpuPrefill:
    """One span of new tokens after those that ``cache`` already holds, kept or dropped."""

    def __init__(
        self, model: _native.Model, pool: _native.ThreadPool, cache: KVCache, ids: list[int]
    ) -> None:
        tokens = np.array(ids, np.int32)
        self._model, self._cache = model, cache
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

    def draft(
        self, next_id: int | None, cancel: _native.CancelFlag
    ) -> tuple[NDArray[np.int32], NDArray[Any]] | None:
        """The draft layer's positions [n] and slots [n, W], after the last layer; spends the span.

        ``next_id`` follows the span; without it the last position is left out. None when ``cancel``
        cut it, when no position is left, and when the layer gives NaN.
        """
        assert self._cache.draft is not None
        token = -1 if next_id is None else next_id
        span = self._native.draft(self._model, self._cache.draft, token, cancel)
        if span is None:
            return None
        first = span.first_position
        positions = np.arange(first, first + span.num_tokens, dtype=np.int32)
        try:
            output = span.run_layer(cancel, 0)
        except _native.NativeError as error:
            if error.args[0] != "non-finite-logits":
                raise
            return None
        return None if output is None else (positions, output[0])

    @property
    def hidden_TD(self) -> NDArray[np.float32]:
        """The residual stream after the layer that ran last."""
        return self._native.hidden

    def figures(self) -> SpanFigures:
        """Nothing crossed a link."""
        return SpanFigures()


class CpuDevice:
    """The PrefillDevice of the native kernels; its spans are cut within a layer."""

    name = "cpu"
    max_tokens: int | None = None
    resumable = False
    pass_bytes = 0

    def __init__(self, model: _native.Model, pool: _native.ThreadPool) -> None:
        self._model, self._pool = model, pool

    def span(
        self,
        cache: KVCache,
        ids: list[int],
        *,
        start_layer: int = 0,
        hidden_TD: NDArray[np.float32] | None = None,
    ) -> CpuPrefill:
        """As in PrefillDevice."""
        if start_layer:
            raise ValueError("a span on the CPU begins with the first layer")
        return CpuPrefill(self._model, self._pool, cache, ids)
