"""The tensors of a DeepSeek-V3 checkpoint: names, shapes, formats, and their roles in the model."""

from __future__ import annotations

import re

from moechat.models.spec import Format, ModelSpec, TensorSpec

_MATRIX: tuple[Format, ...] = ("fp8_block", "bf16", "f32")
_PLAIN: tuple[Format, ...] = ("bf16", "f32")


def tensor_table(spec: ModelSpec) -> list[TensorSpec]:
    """Every tensor of the model, multi-token-prediction layers left out."""
    hidden = spec.hidden_size
    table = [_plain("embedding", "model.embed_tokens.weight", (spec.vocab_size, hidden))]
    for layer in range(spec.num_layers):
        role, name = f"layers.{layer}.", f"model.layers.{layer}."
        table.append(_plain(role + "attention_norm", name + "input_layernorm.weight", (hidden,)))
        _append_attention(table, spec, role, name + "self_attn.")
        table.append(_plain(role + "ffn_norm", name + "post_attention_layernorm.weight", (hidden,)))
        if layer < spec.num_dense_layers:
            _append_ffn(table, role, name + "mlp.", hidden, spec.intermediate_size)
        else:
            _append_moe(table, spec, role, name + "mlp.")
    table.append(_plain("final_norm", "model.norm.weight", (hidden,)))
    if not spec.tied_embeddings:
        table.append(_plain("head", "lm_head.weight", (spec.vocab_size, hidden)))
    return table


def is_skipped(spec: ModelSpec, name: str) -> bool:
    """Whether a tensor outside the table is known to be of no use here.

    These are the declared multi-token-prediction layers, and rotary frequencies that old tools
    stored although config.json determines them.
    """
    if name.endswith(".rotary_emb.inv_freq"):
        return True
    match = re.match(r"model\.layers\.(\d{1,6})\.", name)
    return match is not None and 0 <= int(match[1]) - spec.num_layers < spec.num_mtp_layers


def _append_attention(table: list[TensorSpec], spec: ModelSpec, role: str, name: str) -> None:
    hidden, heads, latent = spec.hidden_size, spec.num_heads, spec.kv_lora_rank
    query_rows = heads * (spec.qk_nope_head_dim + spec.qk_rope_head_dim)
    key_value_rows = heads * (spec.qk_nope_head_dim + spec.v_head_dim)
    if spec.q_lora_rank:
        rank = spec.q_lora_rank
        table.append(_matrix(role + "q_a", name + "q_a_proj", rank, hidden))
        table.append(_plain(role + "q_a_norm", name + "q_a_layernorm.weight", (rank,)))
        table.append(_matrix(role + "q_b", name + "q_b_proj", query_rows, rank))
    else:
        table.append(_matrix(role + "q", name + "q_proj", query_rows, hidden))
    kv_a_rows = latent + spec.qk_rope_head_dim
    table.append(_matrix(role + "kv_a", name + "kv_a_proj_with_mqa", kv_a_rows, hidden))
    table.append(_plain(role + "kv_a_norm", name + "kv_a_layernorm.weight", (latent,)))
    table.append(_matrix(role + "kv_b", name + "kv_b_proj", key_value_rows, latent))
    table.append(_matrix(role + "o", name + "o_proj", hidden, heads * spec.v_head_dim))


def _append_moe(table: list[TensorSpec], spec: ModelSpec, role: str, name: str) -> None:
    hidden, experts = spec.hidden_size, spec.num_experts
    table.append(_plain(role + "router", name + "gate.weight", (experts, hidden)))
    table.append(_plain(role + "router_bias", name + "gate.e_score_correction_bias", (experts,)))
    shared = spec.moe_intermediate_size * spec.num_shared_experts
    _append_ffn(table, role + "shared.", name + "shared_experts.", hidden, shared)
    for expert in range(experts):
        _append_ffn(
            table,
            f"{role}experts.{expert}.",
            f"{name}experts.{expert}.",
            hidden,
            spec.moe_intermediate_size,
        )


def _append_ffn(
    table: list[TensorSpec], role: str, name: str, hidden: int, intermediate: int
) -> None:
    table.append(_matrix(role + "gate", name + "gate_proj", intermediate, hidden))
    table.append(_matrix(role + "up", name + "up_proj", intermediate, hidden))
    table.append(_matrix(role + "down", name + "down_proj", hidden, intermediate))


def _matrix(role: str, module: str, rows: int, cols: int) -> TensorSpec:
    """A linear layer's weight, which may be FP8 with block scales."""
    name = module + ".weight"
    return TensorSpec(name, (rows, cols), _MATRIX, role, name + "_scale_inv")


def _plain(role: str, name: str, shape: tuple[int, ...]) -> TensorSpec:
    """A tensor that is never quantised."""
    return TensorSpec(name, shape, _PLAIN, role)
