"""The tensors of GLM-4 MoE checkpoints."""

from __future__ import annotations

from functools import partial

from moechat.models.config_reader import ConfigReader
from moechat.models.decoder_tensors import decoder_table, grouped_attention_tensors
from moechat.models.moe_tensors import expert_tensors
from moechat.models.spec import ModelSpec, TensorSpec


def tensor_table(spec: ModelSpec, read: ConfigReader) -> list[TensorSpec]:
    """Every tensor of the model. o has no bias even where q, k and v have one."""
    attention = partial(
        grouped_attention_tensors,
        qkv_bias=read.boolean("attention_bias", default=False),
        qk_norm="head" if read.boolean("use_qk_norm", default=False) else "",
    )
    moe = partial(expert_tensors, shared="shared_experts", correction=True)
    return decoder_table(spec, attention, moe=moe)
