"""config.json of Mistral as a ModelSpec."""

from __future__ import annotations

from moechat.models.config_reader import ConfigReader
from moechat.models.decoder_config import grouped_spec, same_window
from moechat.models.rope import read_rope
from moechat.models.spec import ModelSpec

_WINDOW = 4096  # what a file without the key means; null means none


def read_spec(read: ConfigReader, generation: ConfigReader) -> ModelSpec:
    """The model's dimensions. Raises ArchitectureUnsupported, naming the key."""
    read.only("model_type", "mistral")
    read.only("hidden_act", "silu")
    windows = same_window(read, absent=_WINDOW)
    return grouped_spec(read, generation, "mistral", rope=read_rope(read), windows=windows)
