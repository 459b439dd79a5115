"""What new tokens leave in the KV cache: keys and values, or latents.

As cpp/prefill/prefill_attention.cpp. Shapes: T tokens, D hidden, W elements of a slot.
"""

from __future__ import annotations

import torch  # type: ignore[import-not-found, unused-ignore]

from moechat.gpu_weights.products import add_bias, rms_norm, tiled_product
from moechat.gpu_weights.rope import Angles, rotate
from moechat.models.spec import GroupedAttention, LatentAttention, ModelSpec
from moechat.prefill.gpu.source import LayerSource, needed


def new_slots(
    spec: ModelSpec, source: LayerSource, role: str, by: Angles, normed_TD: torch.Tensor
) -> torch.Tensor:
    """[T, W] in the cache's type. ``role`` ends in a dot."""
    sizes = spec.attention
    make = _latent if isinstance(sizes, LatentAttention) else _grouped
    return make(sizes, spec, source, role, by, normed_TD).to(source.dtype)  # type: ignore[arg-type]


def _latent(
    sizes: LatentAttention,
    spec: ModelSpec,
    source: LayerSource,
    role: str,
    by: Angles,
    normed_TD: torch.Tensor,
) -> torch.Tensor:
    rank = sizes.kv_lora_rank
    slots_TW = tiled_product(normed_TD, needed(source, role + "kv_a"))
    norm = source.vector(role + "kv_a_norm")
    slots_TW[:, :rank] = rms_norm(slots_TW[:, :rank], norm, sizes.norm_eps)
    rotate(slots_TW[:, None, rank:], by)
    return slots_TW


def _grouped(
    sizes: GroupedAttention,
    spec: ModelSpec,
    source: LayerSource,
    role: str,
    by: Angles,
    normed_TD: torch.Tensor,
) -> torch.Tensor:
    k, v = (
        add_bias(
            tiled_product(normed_TD, needed(source, role + part)),
            source.vector(f"{role}{part}_bias"),
        )
        for part in ("k", "v")
    )
    k = rms_norm(k, source.vector(role + "k_norm"), spec.rms_norm_eps)
    if sizes.clip > 0:
        k, v = (x.clamp(-sizes.clip, sizes.clip) for x in (k, v))
    rotate(k.view(len(k), sizes.num_kv_heads, -1), by)
    return torch.cat([k, v], 1)
