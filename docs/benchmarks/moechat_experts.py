"""moechat's routed experts on the files of expert_files.py, through the entry point decode uses."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from expert_files import EXPERTS_PER_TOKEN, HIDDEN, INNER
from numpy.typing import NDArray

from moechat import _native
from moechat.bench.kernels.expert_layer import ExpertCalls, native_layer
from moechat.bench.kernels.experts import ExpertShape

SHAPE = ExpertShape("deepseek-v3", HIDDEN, INNER, EXPERTS_PER_TOKEN)


def _view(format_: str, parts: list[NDArray[Any]]) -> _native.MatrixView:
    if format_ == "bf16":
        return _native.MatrixView("bf16", parts[0])
    codes, scales = parts
    if format_ == "fp8":
        return _native.MatrixView("fp8", codes, scales)
    if format_ == "int4":
        return _native.MatrixView("int4", codes.view(np.int32), scales, (1, 32), scale_type="bf16")
    return _native.MatrixView("mxfp4", codes, scales, (1, 32))


class Experts:
    """One layer's routed experts, read in place from the mapping."""

    def __init__(
        self, format_: str, experts: list[dict[str, list[NDArray[Any]]]], threads: int
    ) -> None:
        views = [
            {name: _view(format_, parts) for name, parts in matrices.items()}
            for matrices in experts
        ]
        self._calls = ExpertCalls(native_layer(views, SHAPE), _native.ThreadPool(threads))

    def outputs(
        self, x: NDArray[np.float32], ids: NDArray[np.int32], weights: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Results [tokens, 7168] for x [tokens, 7168], ids and weights [tokens, 8]."""
        out = np.empty_like(x)
        self._calls.run(x, ids, weights, out)
        return out

    def burst(self, x: NDArray[np.float32], ids: Sequence[NDArray[np.int32]]) -> list[float]:
        """Seconds of each call."""
        weights = np.full(ids[0].shape, 1 / EXPERTS_PER_TOKEN, np.float32)
        seconds = []
        for of_call in ids:
            began = time.perf_counter()
            self.outputs(x, of_call, weights)
            seconds.append(time.perf_counter() - began)
        return seconds
