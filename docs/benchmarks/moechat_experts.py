"""moechat's routed experts on the files of expert_files.py, through the entry point decode uses."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from expert_files import EXPERTS_PER_TOKEN, HIDDEN, MATRICES
from numpy.typing import NDArray

from moechat import _native

# A layer's other parts, as small as the native model takes them: they are never computed.
DIMS = {
    "hidden_size": HIDDEN, "vocab_size": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 2,
    "q_lora_rank": 0, "kv_lora_rank": 0, "nope_dim": 0, "rope_dim": 0, "v_dim": 0,
    "latent_norm_eps": 0.0, "qkv_clip": 0.0, "softmax_scale": 1.0, "attention_softcap": 0.0,
    "final_softcap": 0.0, "rms_norm_eps": 1e-6, "embedding_scale": 1.0, "activation": "silu",
    "activation_limit": 0.0, "activation_alpha": 0.0, "num_groups": 1, "num_groups_kept": 1,
    "scoring": "sigmoid", "normalise_weights": False, "routed_scaling": 1.0,
    "num_experts_per_token": EXPERTS_PER_TOKEN,
}  # fmt: skip


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
        zeros = {"attention_norm": 0, "ffn_norm": 0, "q": 2, "k": 2, "v": 2, "router": len(experts)}
        weights: dict[str, Any] = {
            f"layers.0.{role}": np.zeros((rows, HIDDEN) if rows else HIDDEN, np.float32)
            for role, rows in zeros.items()
        }
        weights["layers.0.o"] = np.zeros((HIDDEN, 2), np.float32)
        weights["embedding"] = np.zeros((1, HIDDEN), np.float32)
        for role, array in weights.items():
            if array.ndim == 2:
                weights[role] = _native.MatrixView("f32", array)
        weights["final_norm"] = np.zeros(HIDDEN, np.float32)
        for number, expert in enumerate(experts):
            for name in MATRICES:
                role = f"layers.0.experts.{number}.{name}"
                weights[role] = _view(format_, expert[name])
        dims = {**DIMS, "num_experts": len(experts)}
        self._model = _native.Model(dims, [([1.0], 1.0, False)], [(0, 0)], "bf16", weights)
        self._pool = _native.ThreadPool(threads)

    def outputs(
        self, x: NDArray[np.float32], ids: NDArray[np.int32], weights: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Results [tokens, 7168] for x [tokens, 7168], ids and weights [tokens, 8]."""
        return _native.experts(self._model, self._pool, 0, x, ids, weights)

    def burst(self, x: NDArray[np.float32], ids: Sequence[NDArray[np.int32]]) -> list[float]:
        """Seconds of each call."""
        weights = np.full(ids[0].shape, 1 / EXPERTS_PER_TOKEN, np.float32)
        seconds = []
        for of_call in ids:
            began = time.perf_counter()
            self.outputs(x, of_call, weights)
            seconds.append(time.perf_counter() - began)
        return seconds
