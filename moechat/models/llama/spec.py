"""config.json of Llama as a ModelSpec."""

from __future__ import annotations

from moechat.models.config_reader import ConfigReader
from moechat.models.decoder_config import grouped_spec
from moechat.models.rope import read_rope
from moechat.models.spec import ModelSpec

_THETA = 10000.0  # of files older than the key


def read_spec(read: ConfigReader, generation: ConfigReader) -> ModelSpec:
    """The model's dimensions. Raises ArchitectureUnsupported, naming the key."""
    read.only("model_type", "llama")
    read.only("hidden_act", "silu")
    read.only("rope_interleaved", False)
    read.only("is_llama_config", True)
    for key in ("attention_bias", "mlp_bias"):  # tensors.py asks again
        read.boolean(key, default=False)
    return grouped_spec(read, generation, "llama", rope=read_rope(read, theta=_THETA))
