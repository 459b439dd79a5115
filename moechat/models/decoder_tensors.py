"""The table of tensors that decoder models share: names, shapes, and roles in the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from moechat.models.spec import GroupedAttention, ModelSpec, TensorSpec

# Makes a part of a layer's table from the prefixes of its roles ("layers.3.") and of its names
# ("model.layers.3.").
Part = Callable[[ModelSpec, str, str], list[TensorSpec]]

EMBEDDING_NAME, HEAD_MODULE = "model.embed_tokens.weight", "lm_head"
_NORMS = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_FOUR_NORMS = {
    "attention_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffn_norm": "post_feedforward_layernorm",
}


def dense_mlp(spec: ModelSpec, role: str, name: str, *, bias: bool = False) -> list[TensorSpec]:
    """The MLP of a layer without experts."""
    return mlp(role, name + "mlp.", spec.hidden_size, spec.intermediate_size, bias=bias)


def decoder_table(
    spec: ModelSpec,
    attention: Part,
    *,
    feed_forward: Part = dense_mlp,
    moe: Part | None = None,
    four_norms: bool = False,
    added: float = 0.0,
) -> list[TensorSpec]:
    """Every tensor of the model, multi-token-prediction layers left out.

    ``moe`` takes the place of ``feed_forward`` in layers with experts. ``four_norms``: the branches
    are normed before they are added, too. ``added`` goes to every norm (see TensorSpec).
    """
    hidden = spec.hidden_size
    table = [matrix("embedding", EMBEDDING_NAME, spec.vocab_size, hidden)]
    for index, layer in enumerate(spec.layers):
        role, name = f"layers.{index}.", f"model.layers.{index}."
        for part, norm in (_FOUR_NORMS if four_norms else _NORMS).items():
            table.append(vector(role + part, f"{name}{norm}.weight", hidden, added))
        table += attention(spec, role, name)
        table += moe(spec, role, name) if layer.moe and moe else feed_forward(spec, role, name)
    table.append(vector("final_norm", "model.norm.weight", hidden, added))
    if not spec.tied_embeddings:
        table.append(linear("head", HEAD_MODULE, spec.vocab_size, hidden))
    return table


def grouped_attention_tensors(
    spec: ModelSpec,
    role: str,
    name: str,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: Literal["", "head", "row"] = "",
    added: float = 0.0,
) -> list[TensorSpec]:
    """q, k, v and o. ``qk_norm``: the norms of q and k go over each head, or over the whole row."""
    sizes = spec.attention
    assert isinstance(sizes, GroupedAttention)
    name += "self_attn."
    hidden, head_dim = spec.hidden_size, sizes.head_dim
    query_rows, kv_rows = spec.num_heads * head_dim, sizes.num_kv_heads * head_dim
    table = []
    for part, rows in (("q", query_rows), ("k", kv_rows), ("v", kv_rows)):
        table.append(linear(role + part, f"{name}{part}_proj", rows, hidden))
        if qkv_bias:
            table.append(vector(f"{role}{part}_bias", f"{name}{part}_proj.bias", rows))
        if qk_norm and part != "v":
            size = head_dim if qk_norm == "head" else rows
            table.append(vector(f"{role}{part}_norm", f"{name}{part}_norm.weight", size, added))
    table.append(linear(role + "o", name + "o_proj", hidden, query_rows))
    if o_bias:
        table.append(vector(role + "o_bias", name + "o_proj.bias", hidden))
    return table


def mlp(
    role: str,
    name: str,
    hidden: int,
    intermediate: int,
    *,
    modules: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    bias: bool = False,
) -> list[TensorSpec]:
    """gate, up and down of one MLP; ``modules`` are their names in this order."""
    table = []
    for part, module in zip(("gate", "up", "down"), modules):
        rows, cols = (hidden, intermediate) if part == "down" else (intermediate, hidden)
        table.append(linear(role + part, name + module, rows, cols))
        if bias:
            table.append(vector(f"{role}{part}_bias", f"{name}{module}.bias", rows))
    return table


def linear(role: str, module: str, rows: int, cols: int) -> TensorSpec:
    """A linear layer's weight [rows, cols], which a checkpoint may quantise."""
    return TensorSpec(name=module + ".weight", shape=(rows, cols), role=role, matrix=True)


def matrix(role: str, name: str, rows: int, cols: int) -> TensorSpec:
    """A matrix [rows, cols] that is never quantised."""
    return TensorSpec(name=name, shape=(rows, cols), role=role)


def vector(role: str, name: str, size: int, added: float = 0.0) -> TensorSpec:
    """A vector [size]: a norm or a bias."""
    return TensorSpec(name=name, shape=(size,), role=role, added=added)
