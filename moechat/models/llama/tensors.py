"""The tensors of Llama checkpoints."""

from __future__ import annotations

from functools import partial

from moechat.models.config_reader import ConfigReader
from moechat.models.decoder_tensors import decoder_table, dense_mlp, grouped_attention_tensors
from moechat.models.spec import ModelSpec, TensorSpec


def tensor_table(spec: ModelSpec, read: ConfigReader) -> list[TensorSpec]:
    """Every tensor of the model."""
    bias = read.boolean("attention_bias", default=False)
    attention = partial(grouped_attention_tensors, qkv_bias=bias, o_bias=bias)
    mlp_bias = read.boolean("mlp_bias", default=False)
    return decoder_table(spec, attention, feed_forward=partial(dense_mlp, bias=mlp_bias))
