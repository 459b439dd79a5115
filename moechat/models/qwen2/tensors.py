"""The tensors of Qwen2 checkpoints."""

from __future__ import annotations

from functools import partial

from moechat.models.config_reader import ConfigReader
from moechat.models.decoder_tensors import decoder_table, grouped_attention_tensors
from moechat.models.spec import ModelSpec, TensorSpec


def tensor_table(spec: ModelSpec, read: ConfigReader) -> list[TensorSpec]:
    """Every tensor of the model."""
    return decoder_table(spec, partial(grouped_attention_tensors, qkv_bias=True))
