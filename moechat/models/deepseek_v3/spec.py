"""config.json of DeepSeek-V3 as a ModelSpec."""

from __future__ import annotations

from dataclasses import replace

from moechat.models.config_reader import ConfigReader
from moechat.models.decoder_config import decoder_spec
from moechat.models.latent_attention import latent_attention, latent_softmax_scale
from moechat.models.moe_config import dense_first, grouped_experts
from moechat.models.rope import read_rope
from moechat.models.spec import LayerSpec, ModelSpec


def read_spec(read: ConfigReader, generation: ConfigReader) -> ModelSpec:
    """The model's dimensions. Raises ArchitectureUnsupported, naming the key."""
    read.only("model_type", "deepseek_v3", "kimi_k2")
    read.only("moe_layer_freq", 1)
    read.only("hidden_act", "silu")
    read.only("rope_interleave", True)
    attention = latent_attention(read)
    rope = read_rope(read, latent=True)
    spec = decoder_spec(
        read,
        generation,
        "deepseek_v3",
        attention=attention,
        rope=rope,
        ropes=(rope.rope(attention.rope_dim, interleaved=True),),
        softmax_scale=latent_softmax_scale(attention, rope),
        layers=tuple(LayerSpec(moe=moe) for moe in dense_first(read)),
        moe=grouped_experts(read, groups_required=True),
    )
    return replace(spec, num_mtp_layers=read.integer("num_nextn_predict_layers", 0, 16, default=0))
