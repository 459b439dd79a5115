"""config.json of gpt-oss as a ModelSpec."""

from __future__ import annotations

from dataclasses import replace

from moechat.models.config_reader import ConfigReader
from moechat.models.decoder_config import grouped_spec, num_layers, sliding_layers, window_size
from moechat.models.moe_config import softmax_experts
from moechat.models.rope import read_rope
from moechat.models.spec import ModelSpec

_ALPHA, _LIMIT = 1.702, 7.0


def read_spec(read: ConfigReader, generation: ConfigReader) -> ModelSpec:
    """The model's dimensions. Raises ArchitectureUnsupported, naming the key."""
    read.only("model_type", "gpt_oss")
    read.only("hidden_act", "silu")
    read.boolean("attention_bias", default=True)  # tensors.py asks again
    read.alias("experts_per_token", "num_experts_per_tok")
    read.mentions("initial_context_length")  # the rope section says it again
    if not read.has("rope_scaling") and not read.has("rope_parameters"):
        raise read.unsupported("rope_scaling", "implementations differ in what that means")
    window = window_size(read)
    slides = sliding_layers(read, [layer % 2 == 0 for layer in range(num_layers(read))])
    moe = softmax_experts(read, key="num_local_experts", size_key="intermediate_size")
    spec = grouped_spec(
        read,
        generation,
        "gpt_oss",
        rope=read_rope(read),
        windows=[window if slide else 0 for slide in slides],
        sparse=(True,) * num_layers(read),
        moe=replace(moe, scoring="softmax_chosen"),
    )
    return replace(
        spec,
        activation="swiglu_clamped",
        activation_alpha=read.number("swiglu_alpha", 1e-3, 1e3, default=_ALPHA),
        activation_limit=read.number("swiglu_limit", 1e-3, 1e12, default=_LIMIT),
    )
