"""window_mass, the attention of the last w queries, against float64 numpy on the mapped weights."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from oracles import oracle_folder

from moechat import _native
from moechat.engine.loading import load_model
from moechat.kv.cache import KVCache
from moechat.prefill.cpu import CpuPrefill
from moechat.weights.mapped import Checkpoint

LAYER = "model.layers.0."


@pytest.fixture(scope="module")
def model():
    folder = oracle_folder("deepseek_v3_bf16")
    loaded = load_model(folder, "exact")
    return SimpleNamespace(
        spec=loaded.spec, native=loaded.native, tensors=Checkpoint.open(folder).tensors
    )


def weight(model, name):
    array = model.tensors[name].array
    wide = (array.astype(np.uint32) << 16).view(np.float32) if array.dtype == np.uint16 else array
    return wide.astype(np.float64)


def rms_norm(x, scale, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def rotate(x, cos, sin):
    even, odd = x[..., 0::2], x[..., 1::2]
    out = np.empty_like(x)
    out[..., 0::2], out[..., 1::2] = even * cos - odd * sin, even * sin + odd * cos
    return out


def expected_mass(model, ids, window):
    """Mean over heads of the probabilities that the last ``window`` queries give to each key."""
    spec, attention = model.spec, LAYER + "self_attn."
    heads, nope, rank = spec.num_heads, spec.attention.nope_dim, spec.attention.kv_lora_rank
    rope = spec.ropes[0]

    def product(x, name):
        return x @ weight(model, f"{attention}{name}.weight").T

    def latent_norm(x, name):
        scale = weight(model, f"{attention}{name}.weight")
        return rms_norm(x, scale, spec.attention.norm_eps)

    x = weight(model, "model.embed_tokens.weight")[ids]
    x = rms_norm(x, weight(model, LAYER + "input_layernorm.weight"), spec.rms_norm_eps)
    q = product(latent_norm(product(x, "q_a_proj"), "q_a_layernorm"), "q_b_proj")
    q = q.reshape(len(ids), heads, -1)
    kv = product(x, "kv_a_proj_with_mqa")
    expanded = product(latent_norm(kv[:, :rank], "kv_a_layernorm"), "kv_b_proj")
    expanded = expanded.reshape(len(ids), heads, -1)
    angles = np.arange(len(ids))[:, None] * np.array(rope.inverse_frequencies)
    cos, sin = np.cos(angles) * rope.amplitude, np.sin(angles) * rope.amplitude
    q[..., nope:] = rotate(q[..., nope:], cos[:, None], sin[:, None])
    rope_keys = np.repeat(rotate(kv[:, rank:], cos, sin)[:, None], heads, axis=1)
    k = np.concatenate([expanded[..., :nope], rope_keys], axis=-1)
    scores = np.einsum("qhd,khd->hqk", q, k) * spec.softmax_scale
    scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights[:, -window:].sum(axis=1).mean(axis=0)


@pytest.mark.parametrize(
    ("prefix", "new", "window"),
    [(0, 1, 1), (0, 5, 3), (0, 100, 17), (0, 200, 64), (50, 100, 32), (130, 7, 64)],
)
@pytest.mark.parametrize("threads", [1, 3])
def test_window_mass(model, prefix, new, window, threads):
    spec, pool = model.spec, _native.ThreadPool(threads)
    ids = np.random.default_rng(prefix + new).integers(3, spec.vocab_size, prefix + new).tolist()
    cache = KVCache(0, spec, "exact")
    if prefix:
        first = CpuPrefill(model.native, pool, cache, ids[:prefix])
        positions = np.arange(prefix, dtype=np.int32)
        for layer in range(spec.num_layers):
            cache.native.append(layer, positions, first.run_layer(_native.CancelFlag()).kv_TW)
    span = CpuPrefill(model.native, pool, cache, ids[prefix:])
    mass_n = span.run_layer(_native.CancelFlag(), window).window_mass_n
    want = expected_mass(model, ids, min(window, new))
    assert np.abs(mass_n - want).max() < 1e-5
    assert abs(mass_n.sum() - min(window, new)) < 1e-3
