"""The tensors of a DeepSeek-V3 checkpoint."""

from __future__ import annotations

from functools import partial

from moechat.models.config_reader import ConfigReader
from moechat.models.decoder_tensors import decoder_table
from moechat.models.draft_tensors import draft_table
from moechat.models.latent_attention import latent_tensors
from moechat.models.moe_tensors import expert_tensors
from moechat.models.spec import ModelSpec, TensorSpec

_MOE = partial(expert_tensors, shared="shared_experts", correction=True)


def tensor_table(spec: ModelSpec, read: ConfigReader) -> list[TensorSpec]:
    """Every tensor of the model."""
    return decoder_table(spec, latent_tensors, moe=_MOE)


def draft_tensor_table(spec: ModelSpec, read: ConfigReader) -> list[TensorSpec]:
    """Every tensor of the first multi-token-prediction layer."""
    return draft_table(spec, latent_tensors, _MOE)
