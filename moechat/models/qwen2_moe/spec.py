"""config.json of Qwen2 MoE as a ModelSpec."""

from __future__ import annotations

from dataclasses import replace

from moechat.models.bounds import MAX_SIZE
from moechat.models.config_reader import ConfigReader
from moechat.models.decoder_config import grouped_spec, no_window
from moechat.models.moe_config import softmax_experts, sparse_by_step
from moechat.models.rope import read_rope
from moechat.models.spec import ModelSpec


def read_spec(read: ConfigReader, generation: ConfigReader) -> ModelSpec:
    """The model's dimensions. Raises ArchitectureUnsupported, naming the key."""
    read.only("model_type", "qwen2_moe")
    read.only("hidden_act", "silu")
    read.boolean("qkv_bias", default=True)  # tensors.py asks again
    no_window(read)
    shared = read.integer("shared_expert_intermediate_size", 1, MAX_SIZE)
    return grouped_spec(
        read,
        generation,
        "qwen2_moe",
        rope=read_rope(read),
        sparse=sparse_by_step(read),
        moe=replace(softmax_experts(read), shared_intermediate_size=shared),
    )
