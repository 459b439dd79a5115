"""The tensors of Gemma 2 checkpoints."""

from __future__ import annotations

from moechat.models.config_reader import ConfigReader
from moechat.models.gemma import gemma_table
from moechat.models.spec import ModelSpec, TensorSpec


def tensor_table(spec: ModelSpec, read: ConfigReader) -> list[TensorSpec]:
    """Every tensor of the model."""
    return gemma_table(spec, read)
