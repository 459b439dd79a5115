"""The experts of one layer as a native model, the call that decode makes, and its correctness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moechat import _native
from moechat.bench.kernels.experts import ExpertShape
from moechat.errors import MoechatError, from_native

MAX_RELATIVE_ERROR = 1e-2
_ROWS = 3
_PREFILL_ROWS = 17  # from here on calls are of the prefill class


class KernelMismatch(MoechatError):
    """A kernel's result is not that of the reference kernel."""

    name = "kernel-mismatch"


def native_layer(
    experts: Sequence[Mapping[str, _native.MatrixView]], shape: ExpertShape
) -> _native.Model:
    """A model of one layer with these experts ("gate", "up", "down"); all else is tiny."""
    num_experts, hidden = len(experts), shape.hidden
    roles: dict[str, Any] = {
        f"layers.0.experts.{e}.{name}": view
        for e, matrices in enumerate(experts)
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


def check_against_reference(
    model: _native.Model, pool: _native.ThreadPool, shape: ExpertShape, batch: int
) -> float:
    """Largest difference from ``ref`` over the largest value, same weights, one set of experts.

    One row and a few are computed, since they go through different code. Raises KernelMismatch
    above 1e-2, and for results that are not finite.
    """
    rows = _PREFILL_ROWS if batch >= _PREFILL_ROWS else min(batch, _ROWS)
    generator = np.random.default_rng(4)
    x = generator.standard_normal((rows, shape.hidden)).astype(np.float32)
    per_token = shape.experts_per_token
    ids = np.ascontiguousarray(
        np.broadcast_to(np.arange(per_token, dtype=np.int32), (rows, per_token))
    )
    weights = generator.uniform(0.5, 1.5, ids.shape).astype(np.float32)
    measured = _native.active_instruction_set()
    one, several, wanted = (np.empty_like(x[:n]) for n in (1, rows, rows))
    calls = ExpertCalls(model, pool)
    calls.run(x[:1], ids[:1], weights[:1], one)
    calls.run(x, ids, weights, several)
    try:
        _native.force_instruction_set("ref")
        ExpertCalls(model, pool).run(x, ids, weights, wanted)
    finally:
        _native.force_instruction_set(measured)
    largest = float(np.abs(wanted).max())
    # numpy's maximum keeps a NaN.
    difference = float(np.maximum(np.abs(one - wanted[:1]).max(), np.abs(several - wanted).max()))
    error = difference / largest if largest > 0 else np.inf
    if not error <= MAX_RELATIVE_ERROR:  # NaN is no match
        raise KernelMismatch(
            f"the {measured} kernels compute something else than the reference kernels",
            f"relative difference {error:.3g}, allowed {MAX_RELATIVE_ERROR:g}",
            "Please report it; --isa forces other kernels",
        )
    return error


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
