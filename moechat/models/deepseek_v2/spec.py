"""config.json of DeepSeek-V2 as a ModelSpec."""

from __future__ import annotations

from moechat.models.bounds import MAX_SIZE
from moechat.models.config_reader import ConfigReader
from moechat.models.decoder_config import decoder_spec
from moechat.models.latent_attention import latent_attention, latent_softmax_scale
from moechat.models.moe_config import (
    dense_first,
    expert_groups,
    num_experts,
    routed_scaling,
    shared_size,
)
from moechat.models.rope import read_rope
from moechat.models.spec import LayerSpec, ModelSpec, MoeSpec


def read_spec(read: ConfigReader, generation: ConfigReader) -> ModelSpec:
    """The model's dimensions. Raises ArchitectureUnsupported, naming the key."""
    read.only("model_type", "deepseek_v2")
    read.only("scoring_func", "softmax")
    read.only("moe_layer_freq", 1)
    read.only("hidden_act", "silu")
    read.only("mlp_bias", False)
    attention = latent_attention(read)
    rope = read_rope(read, latent=True)
    return decoder_spec(
        read,
        generation,
        "deepseek_v2",
        attention=attention,
        rope=rope,
        ropes=(rope.rope(attention.rope_dim, interleaved=True),),
        softmax_scale=latent_softmax_scale(attention, rope),
        layers=tuple(LayerSpec(moe=moe) for moe in dense_first(read)),
        moe=_moe(read),
    )


def _moe(read: ConfigReader) -> MoeSpec:
    # With true, the model's own code would divide and not scale, other implementations scale.
    read.only("norm_topk_prob", False)
    experts = num_experts(read, "n_routed_experts")
    read.only("topk_method", "greedy", "group_limited_greedy")
    groups = kept = 1
    if read.text("topk_method") == "group_limited_greedy":
        groups, kept = expert_groups(read, experts, required=True)
    else:
        for key in ("n_group", "topk_group"):  # not used
            read.integer(key, 1, experts, default=1)
    return MoeSpec(
        num_experts=experts,
        num_experts_per_token=read.integer("num_experts_per_tok", 1, experts // groups * kept),
        intermediate_size=read.integer("moe_intermediate_size", 1, MAX_SIZE),
        shared_intermediate_size=shared_size(read),
        num_groups=groups,
        num_groups_kept=kept,
        routed_scaling=routed_scaling(read),
    )
