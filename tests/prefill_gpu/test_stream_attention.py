"""Attention in groups of heads, and joined of a prefix and a span: as large models on CUDA."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")
from moechat.prefill.gpu import attention, layer_attention  # noqa: E402
from moechat.prefill.gpu.attention import AttentionRule, attend, choose_backend  # noqa: E402


def fused(q, k, v, scale, *, causal):
    """What the operator of cuDNN gives, in float32."""
    scores = q.float() @ k.float().transpose(-1, -2) * scale
    if causal:
        assert scores.shape[-1] == scores.shape[-2]
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    sums = scores.logsumexp(-1, keepdim=True)
    return ((scores - sums).exp() @ v.float()).to(q.dtype), sums


@pytest.mark.parametrize(("tokens", "keys"), [(1, 1), (70, 70), (70, 171), (1, 9)])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2)])
def test_prefix_and_span_are_joined(tokens, keys, heads, groups, monkeypatch):
    monkeypatch.setattr(attention, "_cudnn", fused)
    random = torch.Generator().manual_seed(tokens + keys)

    def rows(*shape):  # values that BF16 holds
        return torch.randn(shape, generator=random).bfloat16().float()

    q, k, v = rows(tokens, heads, 24), rows(keys, groups, 24), rows(keys, groups, 16)
    rule = AttentionRule(scale=0.3)
    plain, joined = (attend(backend, q, k, v, rule) for backend in ("plain", "cudnn"))
    assert joined.shape == plain.shape == (tokens, heads, 16)
    assert (joined.float() - plain).abs().max() <= 2.0**-7  # values are below 2: a rounding each


@pytest.mark.parametrize(
    ("device", "dtype", "rule", "backend"),
    [
        ("cuda", torch.bfloat16, AttentionRule(1.0), "cudnn"),
        ("cuda", torch.float32, AttentionRule(1.0), "plain"),
        ("cpu", torch.bfloat16, AttentionRule(1.0), "plain"),
        ("cuda", torch.bfloat16, AttentionRule(1.0, softcap=50.0), "plain"),
        ("cuda", torch.bfloat16, AttentionRule(1.0, sinks_H=torch.zeros(2)), "plain"),
        ("cuda", torch.bfloat16, AttentionRule(1.0, visible_begin=torch.zeros(2)), "plain"),
    ],
)
def test_backend_is_named(device, dtype, rule, backend, monkeypatch):
    monkeypatch.setattr(attention, "_takes", lambda *_: True)
    assert choose_backend(torch.device(device), dtype, rule, (192, 128)) == backend


def test_full_memory_says_nothing_of_a_width(monkeypatch):
    """It would be taken for a kernel that refuses, for as long as the process runs."""
    zeros, full = torch.zeros, [True]

    def takes(q, k, v, scale, *, causal):
        if full:
            raise torch.OutOfMemoryError("full")
        return v, v

    monkeypatch.setattr(torch, "zeros", lambda shape, dtype, device: zeros(shape, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(attention, "_cudnn", takes)
    attention._takes.cache_clear()
    given = torch.device("cuda"), torch.bfloat16, AttentionRule(1.0), (64, 32)
    with pytest.raises(torch.OutOfMemoryError):
        choose_backend(*given)
    full.clear()
    assert choose_backend(*given) == "cudnn"


@pytest.mark.parametrize(
    ("refused", "backend"),
    [((), "cudnn"), (("cudnn",), "efficient"), (("cudnn", "efficient"), "plain")],
)
def test_backends_that_refuse_a_width(refused, backend, monkeypatch):
    def takes(q, k, v, scale, *, causal):
        return v, v

    def refuses(q, k, v, scale, *, causal):
        raise RuntimeError("hidden_dim should be less")

    for name in ("cudnn", "efficient"):
        monkeypatch.setattr(attention, f"_{name}", refuses if name in refused else takes)
    # A device without memory or kernels: what is tried is replaced.
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda shape, dtype, device: zeros(shape, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    attention._takes.cache_clear()
    given = torch.device("cuda"), torch.bfloat16, AttentionRule(1.0)
    assert choose_backend(*given, (64, 32)) == backend
    assert choose_backend(*given, (64, 36)) == "plain"
    attention._takes.cache_clear()


@pytest.mark.parametrize("tokens", [1, 40])
def test_sums_of_whole_blocks_are_cut(tokens, monkeypatch):
    """torch's kernel gives them for multiples of 32 queries."""

    def operator(q, k, v, bias, with_sums, dropout, causal, *, scale):
        values, sums = fused(q, k, v, scale, causal=causal)
        padded = torch.full((*sums.shape[:2], -(-tokens // 32) * 32), torch.inf)
        padded[..., :tokens] = sums[..., 0]
        return values, padded, None, None

    monkeypatch.setattr(
        torch.ops.aten, "_scaled_dot_product_efficient_attention", operator, raising=False
    )
    q, k = torch.randn(tokens, 2, 24).bfloat16(), torch.randn(tokens + 9, 2, 24).bfloat16()
    v = torch.randn(tokens + 9, 2, 16).bfloat16()
    rule = AttentionRule(scale=0.3)
    plain, found = (attend(backend, q, k, v, rule) for backend in ("plain", "efficient"))
    assert (found.float() - plain).abs().max() <= 2.0**-6


@pytest.mark.parametrize(("limit", "counts"), [(3, [2, 2]), (1, [1] * 4), (4, [4])])
def test_heads_in_even_groups(limit, counts, monkeypatch):
    """4 heads, at most ``limit`` at a time."""
    from plain_source import PlainSource
    from test_stream_prefill import NEVER, both

    name = "deepseek_v3_bf16"
    spec = PlainSource(name, "exact").spec
    sizes, keys = spec.attention, 150
    head_bytes = 4 * (sizes.nope_dim + sizes.rope_dim + sizes.v_dim) * (75 + keys)
    monkeypatch.setattr(layer_attention, "GROUP_BYTES", limit * head_bytes)
    seen = []

    def noted(backend, q, k, v, rule):
        seen.append(q.shape[1])
        return attend(backend, q, k, v, rule)

    monkeypatch.setattr(layer_attention, "attend", noted)
    _, (native, streamed) = both(name, "exact", 75)
    theirs, ours = native.run_layer(NEVER, 20), streamed.run_layer(NEVER, 20)
    assert seen == counts
    assert abs(ours.window_mass_n - theirs.window_mass_n).max() <= 1e-4
    assert abs(streamed.hidden_TD - native.hidden_TD).max() <= 1e-3


@pytest.mark.parametrize("name", ["deepseek_v3_bf16", "olmoe"])
def test_a_model_by_the_fused_backend(name, monkeypatch):
    """Queries, keys and values in BF16; rows in pieces."""
    from test_stream_prefill import NEVER, both, rms_bound, run

    monkeypatch.setattr(layer_attention, "choose_backend", lambda *_: "cudnn")
    monkeypatch.setattr(layer_attention, "WIDE_ROWS", 64)
    monkeypatch.setattr(attention, "_cudnn", fused)
    cache, (native, streamed) = both(name, "bf16", 75)
    layers = [run(span, cache, window=20) for span in (native, streamed)]
    rerouted_T = np.zeros(75, bool)
    for theirs, ours in zip(*layers):
        assert abs(ours.window_mass_n - theirs.window_mass_n).max() <= 0.2
        ids = [np.sort(output.router_ids_TK, 1) for output in (theirs, ours)]
        rerouted_T |= (ids[0] != ids[1]).any(1)
    assert rerouted_T.sum() <= 1  # a near tie, whose token has other logits
    error = (native.logits(NEVER, 0) - streamed.logits(NEVER, 0))[~rerouted_T]
    assert set(streamed.attention_backends) == {"cudnn"}
    assert (error**2).mean() ** 0.5 <= rms_bound(name)
