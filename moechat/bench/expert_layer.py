"""The experts of one layer as a native model, and the call that decode makes for them."""

from __future__ import annotations

from typing import Any

import numpy as np

from moechat import _native
from moechat.bench.expert_weights import ExpertWeights
from moechat.bench.shapes import ExpertShape
from moechat.errors import from_native


def native_layer(weights: ExpertWeights, shape: ExpertShape) -> _native.Model:
    """A model of one layer whose experts are ``weights``; all else is as small as can be."""
    num_experts, hidden = len(weights.experts), shape.hidden
    roles: dict[str, Any] = {
        f"layers.0.experts.{e}.{name}": view
        for e, matrices in enumerate(weights.experts)
        for name, view in matrices.items()
    }
    roles["final_norm"] = roles["layers.0.attention_norm"] = roles["layers.0.ffn_norm"] = np.ones(
        hidden, np.float32
    )
    roles["embedding"] = _zeros(1, hidden)
    for name in ("q", "k", "v"):
        roles[f"layers.0.{name}"] = _zeros(_HEAD_DIM, hidden)
    roles["layers.0.o"] = _zeros(hidden, _HEAD_DIM)
    roles["layers.0.router"] = _zeros(num_experts, hidden)
    dims = _OTHER_DIMS | {
        "hidden_size": hidden,
        "num_experts": num_experts,
        "num_experts_per_token": shape.experts_per_token,
    }
    try:
        return _native.Model(
            dims=dims, ropes=[([1.0], 1.0, False)], layers=[(0, 0)], compute="bf16", weights=roles
        )
    except _native.NativeError as error:
        raise from_native(*error.args) from error


class ExpertCalls:
    """``moe_ffn`` as decode calls it, on one pool, with the instruction set in use at the time."""

    def __init__(self, model: _native.Model, pool: _native.ThreadPool) -> None:
        self._experts = _native.Experts(model, pool)

    def run(
        self,
        x: _native.Float32,
        ids: _native.Int32,
        weights: _native.Float32,
        out: _native.Float32,
    ) -> None:
        """x [rows, hidden], ids and weights [rows, experts per token] into out [rows, hidden]."""
        self._experts.run(0, x, ids, weights, out)


_HEAD_DIM = 2
_OTHER_DIMS: dict[str, Any] = {
    "vocab_size": 1,
    "num_heads": 1,
    "num_kv_heads": 1,
    "head_dim": _HEAD_DIM,
    "q_lora_rank": 0,
    "kv_lora_rank": 0,
    "nope_dim": 0,
    "rope_dim": 0,
    "v_dim": 0,
    "latent_norm_eps": 0.0,
    "qkv_clip": 0.0,
    "softmax_scale": 1.0,
    "attention_softcap": 0.0,
    "final_softcap": 0.0,
    "rms_norm_eps": 1e-6,
    "embedding_scale": 1.0,
    "activation": "silu",
    "activation_limit": 0.0,
    "activation_alpha": 0.0,
    "num_groups": 1,
    "num_groups_kept": 1,
    "scoring": "softmax",
    "normalise_weights": True,
    "routed_scaling": 1.0,
}


def _zeros(rows: int, cols: int) -> _native.MatrixView:
    return _native.MatrixView("f32", np.zeros((rows, cols), np.float32))
