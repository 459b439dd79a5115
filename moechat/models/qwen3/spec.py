"""config.json of Qwen3 as a ModelSpec."""

from __future__ import annotations

from moechat.models.config_reader import ConfigReader
from moechat.models.decoder_config import grouped_spec, window_by_flag
from moechat.models.rope import read_rope
from moechat.models.spec import ModelSpec


def read_spec(read: ConfigReader, generation: ConfigReader) -> ModelSpec:
    """The model's dimensions. Raises ArchitectureUnsupported, naming the key."""
    read.only("model_type", "qwen3")
    read.only("hidden_act", "silu")
    read.boolean("attention_bias", default=False)  # tensors.py asks again
    windows = window_by_flag(read)
    return grouped_spec(read, generation, "qwen3", rope=read_rope(read), windows=windows)
