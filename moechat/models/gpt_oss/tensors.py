"""The tensors of gpt-oss checkpoints."""

from __future__ import annotations

from functools import partial

from moechat.models.config_reader import ConfigReader
from moechat.models.decoder_tensors import (
    decoder_table,
    grouped_attention_tensors,
    matrix,
    vector,
)
from moechat.models.spec import ModelSpec, TensorSpec


def tensor_table(spec: ModelSpec, read: ConfigReader) -> list[TensorSpec]:
    """Every tensor of the model."""
    bias = read.boolean("attention_bias", default=True)
    return decoder_table(spec, partial(_attention, bias=bias), moe=_experts)


def _attention(spec: ModelSpec, role: str, name: str, *, bias: bool) -> list[TensorSpec]:
    table = grouped_attention_tensors(spec, role, name, qkv_bias=bias, o_bias=bias)
    return [*table, vector(role + "sinks", name + "self_attn.sinks", spec.num_heads)]


def _experts(spec: ModelSpec, role: str, name: str) -> list[TensorSpec]:
    """All experts in one tensor, the inputs before the outputs, gate and up interleaved."""
    moe = spec.moe
    assert moe is not None
    experts, hidden, size = moe.num_experts, spec.hidden_size, moe.intermediate_size
    gate_up, down = name + "mlp.experts.gate_up_proj", name + "mlp.experts.down_proj"
    stacked = role + "experts.*."
    return [
        matrix(role + "router", name + "mlp.router.weight", experts, hidden),
        vector(role + "router_bias", name + "mlp.router.bias", experts),
        TensorSpec(
            name=gate_up,
            shape=(experts, hidden, 2 * size),
            role=stacked + "gate_up",
            matrix=True,
            stacked=True,
            transposed=True,
            interleaved=True,
        ),
        TensorSpec(
            name=gate_up + "_bias",
            shape=(experts, 2 * size),
            role=stacked + "gate_up_bias",
            stacked=True,
            interleaved=True,
        ),
        TensorSpec(
            name=down,
            shape=(experts, size, hidden),
            role=stacked + "down",
            matrix=True,
            stacked=True,
            transposed=True,
        ),
        TensorSpec(
            name=down + "_bias", shape=(experts, hidden), role=stacked + "down_bias", stacked=True
        ),
    ]
