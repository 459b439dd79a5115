"""A model of one layer of routed experts in any format, with biases, for tests of `experts`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from reference import F32, Variant, random_weight
from shapes import Shape

from moechat import _native

HIDDEN, NUM_EXPERTS, TOP_K = 256, 4, 2
_ZERO = (
    "q_lora_rank kv_lora_rank nope_dim rope_dim v_dim latent_norm_eps qkv_clip attention_softcap "
    "final_softcap activation_limit activation_alpha"
)
_DIMS: dict[str, Any] = {
    **dict.fromkeys(_ZERO.split(), 0),
    "vocab_size": 8,
    "num_heads": 1,
    "num_kv_heads": 1,
    "head_dim": 16,
    "softmax_scale": 1.0,
    "rms_norm_eps": 1e-6,
    "embedding_scale": 1.0,
    "activation": "silu",
    "num_experts": NUM_EXPERTS,
    "num_experts_per_token": TOP_K,
    "num_groups": 1,
    "num_groups_kept": 1,
    "scoring": "softmax",
    "normalise_weights": False,
    "routed_scaling": 1.0,
}


@functools.cache
def matrix(outputs: int, inputs: int, variant: Variant, seed: int) -> _native.MatrixView:
    """A random weight [outputs, inputs], stored as the variant has it."""
    rows, cols = (inputs, outputs) if variant.transposed else (outputs, inputs)
    return random_weight(Shape("weight", rows, cols), variant, seed).view


def weights_but_experts(hidden: int, num_experts: int) -> dict[str, Any]:
    """Of a model of one layer, as small as can be."""
    weights: dict[str, Any] = {"final_norm": np.ones(hidden, np.float32)}
    shapes = {"embedding": (8, hidden), "layers.0.q": (16, hidden), "layers.0.k": (16, hidden),
              "layers.0.v": (16, hidden), "layers.0.o": (hidden, 16),
              "layers.0.router": (num_experts, hidden)}  # fmt: skip
    for role, shape in shapes.items():
        weights[role] = matrix(*shape, F32, 2)
    for role in ("attention_norm", "ffn_norm"):
        weights[f"layers.0.{role}"] = np.ones(hidden, np.float32)
    return weights


def expert_model(
    variants: list[Variant], inner: int, compute: str, hidden: int = HIDDEN
) -> _native.Model:
    """Expert e has the format variants[e % len(variants)] and ``inner`` inner elements."""
    random = np.random.default_rng(1)
    weights = weights_but_experts(hidden, NUM_EXPERTS)
    for expert in range(NUM_EXPERTS):
        variant, prefix = variants[expert % len(variants)], f"layers.0.experts.{expert}."
        for number, (name, shape) in enumerate(
            {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items()
        ):
            weights[prefix + name] = matrix(*shape, variant, 10 + 3 * expert + number)
            bias = 0.1 * random.standard_normal(shape[0])
            weights[f"{prefix}{name}_bias"] = bias.astype(np.float32)
    rope = ([1.0, 0.1], 1.0, False)
    return _native.Model({**_DIMS, "hidden_size": hidden}, [rope], [(0, 0)], compute, weights)


def routing(rows: int, hidden: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs [rows, hidden], ids [rows, TOP_K] and weights [rows, TOP_K]; a row's own are fixed."""
    x, ids, weights = [], [], []
    for row in range(rows):
        random = np.random.default_rng([7, row])
        x.append(random.standard_normal(hidden))
        ids.append(random.permutation(NUM_EXPERTS)[:TOP_K])
        weights.append(random.random(TOP_K))
    return (
        np.array(x, np.float32),
        np.array(ids, np.int32),
        np.array(weights, np.float32),
    )


def run_experts(
    model: _native.Model, pool: _native.ThreadPool, rows: slice, hidden: int = HIDDEN
) -> np.ndarray:
    """The experts' output [rows, hidden] for those rows of ``routing``."""
    x, ids, weights = (np.ascontiguousarray(part[rows]) for part in routing(rows.stop, hidden))
    out = np.full_like(x, np.nan)
    _native.Experts(model, pool).run(0, x, ids, weights, out)
    return out
