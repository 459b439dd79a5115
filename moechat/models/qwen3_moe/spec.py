"""config.json of Qwen3 MoE as a ModelSpec."""

from __future__ import annotations

from moechat.models.config_reader import ConfigReader
from moechat.models.decoder_config import grouped_spec, no_window
from moechat.models.moe_config import softmax_experts, sparse_by_step
from moechat.models.rope import read_rope
from moechat.models.spec import ModelSpec


def read_spec(read: ConfigReader, generation: ConfigReader) -> ModelSpec:
    """The model's dimensions. Raises ArchitectureUnsupported, naming the key."""
    read.only("model_type", "qwen3_moe")
    read.only("hidden_act", "silu")
    # Settings of relatives that some files of this family carry along.
    read.only("qkv_bias", False)
    read.only("use_qk_norm", True)
    read.only("shared_expert_intermediate_size", 0)
    read.alias("num_local_experts", "num_experts")
    read.boolean("attention_bias", default=False)  # tensors.py asks again
    no_window(read)
    return grouped_spec(
        read,
        generation,
        "qwen3_moe",
        rope=read_rope(read),
        sparse=sparse_by_step(read),
        moe=softmax_experts(read),
    )
