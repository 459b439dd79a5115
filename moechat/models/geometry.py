"""A spec's dimensions under the names of models.toml, for people and for memory arithmetic."""

from __future__ import annotations

from typing import Any

from moechat.models.spec import LatentAttention, ModelSpec


def geometry(spec: ModelSpec) -> dict[str, Any]:
    """Only what the model has: a dense one has no experts, a grouped one no latent."""
    facts: dict[str, Any] = {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "vocab_size": spec.vocab_size,
        "num_heads": spec.num_heads,
    }
    attention = spec.attention
    if isinstance(attention, LatentAttention):
        facts |= {
            "q_lora_rank": attention.q_lora_rank,
            "kv_lora_rank": attention.kv_lora_rank,
            "qk_nope_head_dim": attention.nope_dim,
            "qk_rope_head_dim": attention.rope_dim,
            "v_head_dim": attention.v_dim,
        }
    else:
        facts |= {"num_kv_heads": attention.num_kv_heads, "head_dim": attention.head_dim}
    windows = {layer.window for layer in spec.layers if layer.window}
    if windows:
        facts |= {
            "sliding_window": max(windows),
            "num_sliding_layers": sum(layer.window > 0 for layer in spec.layers),
        }
    if spec.moe is not None:
        facts |= {
            "num_dense_layers": sum(not layer.moe for layer in spec.layers),
            "num_experts": spec.moe.num_experts,
            "num_experts_per_token": spec.moe.num_experts_per_token,
            "moe_intermediate_size": spec.moe.intermediate_size,
            "shared_intermediate_size": spec.moe.shared_intermediate_size,
            "num_groups": spec.moe.num_groups,
            "num_groups_kept": spec.moe.num_groups_kept,
        }
    facts |= {"tied_embeddings": spec.tied_embeddings, "num_mtp_layers": spec.num_mtp_layers}
    return facts


def kv_elements_per_token(facts: dict[str, Any]) -> int | None:
    """KV cache elements of one token in all layers, without windows; None when facts are missing.

    ``facts`` come from geometry() or from models.toml. Latent attention keeps a latent and a shared
    rotary key a layer, grouped attention a key and a value for each key-value head.
    """
    for keys, factor in (
        (("num_layers", "kv_lora_rank", "qk_rope_head_dim"), None),
        (("num_layers", "num_kv_heads", "head_dim"), 2),
    ):
        values = [facts.get(key) for key in keys]
        if all(type(value) is int for value in values):
            layers, first, second = (int(value) for value in values)  # type: ignore[arg-type]
            return layers * (first + second if factor is None else factor * first * second)
    return None
