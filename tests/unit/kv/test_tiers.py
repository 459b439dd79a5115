"""Layouts, and what each tier costs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from kv_layouts import GROUPED, LATENT, grouped, latent

from moechat.kv.layout import KVLayout, Part
from moechat.kv.tiers import Tier, budget_bytes_per_token, bytes_per_token, coded_parts
from moechat.models.spec import GroupedAttention, LatentAttention


def test_layout_of_a_model() -> None:
    attention = GroupedAttention(num_kv_heads=2, head_dim=16)
    assert KVLayout.of(SimpleNamespace(attention=attention)) == GROUPED
    attention = LatentAttention(
        q_lora_rank=0, kv_lora_rank=32, nope_dim=4, rope_dim=8, v_dim=4, norm_eps=1e-6
    )
    assert KVLayout.of(SimpleNamespace(attention=attention)) == LATENT
    assert (GROUPED.width, GROUPED.centred_width) == (64, 32)
    assert (LATENT.width, LATENT.centred_width) == (40, 40)


@pytest.mark.parametrize(
    "parts",
    [(), (Part(1, 4, "key"),), (Part(0, 4, "key"), Part(5, 4, "value")), (Part(0, 0, "key"),)],
)
def test_gaps_are_refused(parts: tuple[Part, ...]) -> None:
    with pytest.raises(ValueError):
        KVLayout(parts)


def test_bytes_of_real_geometries() -> None:
    eight_heads = grouped(8, 128)  # Qwen3: 16 parts
    assert budget_bytes_per_token(eight_heads) == 4096
    assert bytes_per_token(eight_heads, Tier.NATIVE) == 4096
    assert bytes_per_token(eight_heads, Tier.NATIVE, element_bytes=4) == 8192
    assert bytes_per_token(eight_heads, Tier.FP16) == 4096
    assert bytes_per_token(eight_heads, Tier.INT8) == 16 * 130
    assert bytes_per_token(eight_heads, Tier.K8V4) == 8 * 130 + 8 * 66
    assert bytes_per_token(eight_heads, Tier.INT4) == 16 * 66
    deepseek = latent(512, 64)
    assert bytes_per_token(deepseek, Tier.INT8) == 514 + 128
    assert bytes_per_token(deepseek, Tier.INT4) == 258 + 66
    assert bytes_per_token(grouped(1, 7), Tier.INT4) == 2 * (4 + 2)


def test_tiers_that_a_layout_has_not() -> None:
    with pytest.raises(ValueError, match="K8V4"):
        bytes_per_token(LATENT, Tier.K8V4)
    with pytest.raises(ValueError, match="NATIVE"):
        coded_parts(GROUPED, Tier.NATIVE)
