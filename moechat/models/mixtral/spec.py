"""config.json of Mixtral as a ModelSpec."""

from __future__ import annotations

from dataclasses import replace

from moechat.models.config_reader import ConfigReader
from moechat.models.decoder_config import grouped_spec, num_layers, same_window
from moechat.models.moe_config import softmax_experts
from moechat.models.rope import read_rope
from moechat.models.spec import ModelSpec


def read_spec(read: ConfigReader, generation: ConfigReader) -> ModelSpec:
    """The model's dimensions. Raises ArchitectureUnsupported, naming the key."""
    read.only("model_type", "mixtral")
    read.only("hidden_act", "silu")
    moe = softmax_experts(read, key="num_local_experts", size_key="intermediate_size")
    return grouped_spec(
        read,
        generation,
        "mixtral",
        rope=read_rope(read),
        windows=same_window(read, absent=0),
        sparse=(True,) * num_layers(read),
        moe=replace(moe, normalise_weights=True),
    )
