"""config.json of GLM-4 MoE as a ModelSpec."""

from __future__ import annotations

from dataclasses import replace

from moechat.models.config_reader import ConfigReader
from moechat.models.decoder_config import grouped_spec
from moechat.models.moe_config import dense_first, grouped_experts
from moechat.models.rope import read_rope
from moechat.models.spec import ModelSpec

_ROTATED_SHARE = 0.5  # of files without partial_rotary_factor


def read_spec(read: ConfigReader, generation: ConfigReader) -> ModelSpec:
    """The model's dimensions. Raises ArchitectureUnsupported, naming the key."""
    read.only("model_type", "glm4_moe")
    read.only("hidden_act", "silu")
    for key in ("attention_bias", "use_qk_norm"):  # tensors.py asks again
        read.boolean(key, default=False)
    spec = grouped_spec(
        read,
        generation,
        "glm4_moe",
        rope=read_rope(read, rotated_share=_ROTATED_SHARE),
        sparse=dense_first(read),
        moe=grouped_experts(read, groups_required=False),
    )
    return replace(spec, num_mtp_layers=read.integer("num_nextn_predict_layers", 0, 16, default=0))
