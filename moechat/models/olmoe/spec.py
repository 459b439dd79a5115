"""config.json of OLMoE as a ModelSpec."""

from __future__ import annotations

from dataclasses import replace

from moechat.models.config_reader import ConfigReader
from moechat.models.decoder_config import grouped_attention, grouped_spec, num_layers
from moechat.models.moe_config import softmax_experts
from moechat.models.rope import read_rope
from moechat.models.spec import ModelSpec


def read_spec(read: ConfigReader, generation: ConfigReader) -> ModelSpec:
    """The model's dimensions. Raises ArchitectureUnsupported, naming the key."""
    read.only("model_type", "olmoe")
    read.only("hidden_act", "silu")
    read.boolean("attention_bias", default=False)  # tensors.py asks again
    spec = grouped_spec(
        read,
        generation,
        "olmoe",
        rope=read_rope(read),
        sparse=(True,) * num_layers(read),
        moe=softmax_experts(read, size_key="intermediate_size"),
    )
    clip = read.number("clip_qkv", 1e-6, 1e6, default=0.0)
    return replace(spec, attention=replace(grouped_attention(read), clip=clip))
