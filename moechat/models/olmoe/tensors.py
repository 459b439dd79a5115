"""The tensors of OLMoE checkpoints."""

from __future__ import annotations

from functools import partial

from moechat.models.config_reader import ConfigReader
from moechat.models.decoder_tensors import decoder_table, grouped_attention_tensors
from moechat.models.moe_tensors import expert_tensors
from moechat.models.spec import ModelSpec, TensorSpec


def tensor_table(spec: ModelSpec, read: ConfigReader) -> list[TensorSpec]:
    """Every tensor of the model."""
    bias = read.boolean("attention_bias", default=False)
    attention = partial(grouped_attention_tensors, qkv_bias=bias, o_bias=bias, qk_norm="row")
    return decoder_table(spec, attention, moe=expert_tensors)
