"""The tensors of Qwen2 MoE checkpoints."""

from __future__ import annotations

from functools import partial

from moechat.models.config_reader import ConfigReader
from moechat.models.decoder_tensors import decoder_table, grouped_attention_tensors
from moechat.models.moe_tensors import expert_tensors
from moechat.models.spec import ModelSpec, TensorSpec


def tensor_table(spec: ModelSpec, read: ConfigReader) -> list[TensorSpec]:
    """Every tensor of the model."""
    bias = read.boolean("qkv_bias", default=True)
    attention = partial(grouped_attention_tensors, qkv_bias=bias)
    moe = partial(expert_tensors, shared="shared_expert", gated=True)
    return decoder_table(spec, attention, moe=moe)
