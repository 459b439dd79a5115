"""The tensors of Mixtral checkpoints."""

from __future__ import annotations

from functools import partial

from moechat.models.config_reader import ConfigReader
from moechat.models.decoder_tensors import decoder_table, grouped_attention_tensors
from moechat.models.moe_tensors import expert_tensors
from moechat.models.spec import ModelSpec, TensorSpec


def tensor_table(spec: ModelSpec, read: ConfigReader) -> list[TensorSpec]:
    """Every tensor of the model. w1, w3 and w2 are gate, up and down."""
    moe = partial(expert_tensors, module="block_sparse_moe.", expert_modules=("w1", "w3", "w2"))
    return decoder_table(spec, grouped_attention_tensors, moe=moe)
