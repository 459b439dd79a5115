"""config.json of Qwen2 as a ModelSpec."""

from __future__ import annotations

from moechat.models.config_reader import ConfigReader
from moechat.models.decoder_config import grouped_spec, window_by_flag
from moechat.models.rope import read_rope
from moechat.models.spec import ModelSpec


def read_spec(read: ConfigReader, generation: ConfigReader) -> ModelSpec:
    """The model's dimensions. Raises ArchitectureUnsupported, naming the key."""
    read.only("model_type", "qwen2")
    read.only("hidden_act", "silu")
    windows = window_by_flag(read)
    return grouped_spec(read, generation, "qwen2", rope=read_rope(read), windows=windows)
