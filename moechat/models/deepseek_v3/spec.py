"""config.json of DeepSeek-V3 as a ModelSpec; what would be computed wrongly is refused."""

from __future__ import annotations

from typing import Any

from moechat.models.config_reader import ConfigReader
from moechat.models.deepseek_v3.rope import Yarn, inverse_frequencies
from moechat.models.spec import ModelSpec

# Keys that change nothing in inference: provenance, training, and the element type, which each
# tensor states itself.
_HARMLESS = (
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "aux_loss_alpha",
    "dtype",
    "ep_size",
    "initializer_range",
    "pad_token_id",
    "pretraining_tp",
    "seq_aux",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
# How activations were quantised, and which modules were not: moechat does not quantise
# activations, and takes each tensor's format from its own type.
_HARMLESS_QUANTIZATION = ("activation_scheme", "modules_to_not_convert", "scale_fmt")

# The norms of the two latents use this whatever rms_norm_eps says.
_LATENT_NORM_EPS = 1e-6
# Bounds that keep a damaged config from asking for absurd tables; DeepSeek-V3 has 15,616 experts.
_MAX_SIZE = 1 << 20
_MAX_EXPERTS_IN_ALL = 1 << 17


def read_spec(config: dict[str, Any], generation_config: dict[str, Any]) -> ModelSpec:
    """The model's dimensions. Raises ArchitectureUnsupported, naming the key."""
    read = ConfigReader(config)
    _refuse_other_variants(read)
    num_layers = read.integer("num_hidden_layers", 1, 1024)
    num_heads = read.integer("num_attention_heads", 1, 4096)
    if read.integer("num_key_value_heads", 1, 4096, default=num_heads) != num_heads:
        raise read.unsupported("num_key_value_heads", f"it must equal the {num_heads} heads")
    nope_dim = read.integer("qk_nope_head_dim", 1, 4096)
    rope_dim = read.integer("qk_rope_head_dim", 2, 4096)
    if rope_dim % 2:
        raise read.unsupported("qk_rope_head_dim", "rotation needs an even number")
    read.only("head_dim", rope_dim)
    read.only("qk_head_dim", nope_dim + rope_dim)
    num_experts = read.integer("n_routed_experts", 1, 4096)
    if num_layers * num_experts > _MAX_EXPERTS_IN_ALL:
        raise read.unsupported("n_routed_experts", f"over {_MAX_EXPERTS_IN_ALL} experts in all")
    groups, groups_kept, experts_per_token = _routing(read, num_experts)
    theta, yarn = _rope_settings(read)
    vocab_size = read.integer("vocab_size", 1, 1 << 24)
    bos_ids = read.token_ids("bos_token_id", vocab_size)
    config_ends = read.token_ids("eos_token_id", vocab_size)
    generation = ConfigReader(generation_config, "generation_config.json")
    generation_ends = generation.token_ids("eos_token_id", vocab_size)
    spec = ModelSpec(
        architecture="DeepseekV3ForCausalLM",
        hidden_size=read.integer("hidden_size", 1, _MAX_SIZE),
        vocab_size=vocab_size,
        num_layers=num_layers,
        num_heads=num_heads,
        q_lora_rank=read.integer("q_lora_rank", 0, _MAX_SIZE, default=0),
        kv_lora_rank=read.integer("kv_lora_rank", 1, _MAX_SIZE),
        qk_nope_head_dim=nope_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=read.integer("v_head_dim", 1, 4096),
        intermediate_size=read.integer("intermediate_size", 1, _MAX_SIZE),
        moe_intermediate_size=read.integer("moe_intermediate_size", 1, _MAX_SIZE),
        num_experts=num_experts,
        num_experts_per_token=experts_per_token,
        num_shared_experts=read.integer("n_shared_experts", 1, 64),
        num_dense_layers=read.integer("first_k_dense_replace", 0, num_layers),
        num_groups=groups,
        num_groups_kept=groups_kept,
        normalise_weights=read.boolean("norm_topk_prob"),
        routed_scaling=read.number("routed_scaling_factor", 1e-6, 1e6),
        rms_norm_eps=read.number("rms_norm_eps", 1e-12, 1e-1),
        latent_norm_eps=_LATENT_NORM_EPS,
        rope_inverse_frequencies=inverse_frequencies(rope_dim, theta, yarn),
        rope_amplitude=yarn.amplitude if yarn else 1.0,
        softmax_scale=(nope_dim + rope_dim) ** -0.5 * (yarn.softmax_factor if yarn else 1.0),
        context_tokens=read.integer("max_position_embeddings", 1, 1 << 30),
        tied_embeddings=read.boolean("tie_word_embeddings", default=False),
        bos_id=bos_ids[0] if bos_ids else None,
        end_ids=tuple(dict.fromkeys(generation_ends + config_ends)),
        num_mtp_layers=read.integer("num_nextn_predict_layers", 0, 16, default=0),
    )
    read.finish(_HARMLESS)
    return spec


def _refuse_other_variants(read: ConfigReader) -> None:
    """Settings of which only DeepSeek-V3's own value is implemented."""
    read.only("model_type", "deepseek_v3")
    read.only("scoring_func", "sigmoid")
    read.only("topk_method", "noaux_tc")
    read.only("moe_layer_freq", 1)
    read.only("attention_bias", False)
    read.only("hidden_act", "silu")
    read.only("rope_interleave", True)
    quantization = read.section("quantization_config")
    if quantization is not None:
        quantization.only("quant_method", "fp8", required=True)
        quantization.only("fmt", "e4m3")
        quantization.only("weight_block_size", [128, 128], required=True)
        quantization.finish(_HARMLESS_QUANTIZATION)


def _routing(read: ConfigReader, num_experts: int) -> tuple[int, int, int]:
    """Groups, groups kept, experts a token."""
    groups = read.integer("n_group", 1, num_experts, default=1)
    if num_experts % groups:
        raise read.unsupported("n_group", f"it must divide the {num_experts} experts")
    group_size = num_experts // groups
    if groups > 1 and group_size < 2:
        raise read.unsupported("n_group", "a group is scored by its two best experts")
    kept = read.integer("topk_group", 1, groups, default=groups)
    return groups, kept, read.integer("num_experts_per_tok", 1, kept * group_size)


def _rope_settings(read: ConfigReader) -> tuple[float, Yarn | None]:
    """Base and YaRN settings, from rope_scaling and rope_theta or the newer rope_parameters."""
    old, new = read.section("rope_scaling"), read.section("rope_parameters")
    if old is not None and new is not None:
        raise read.unsupported("rope_scaling", "rope_parameters says it a second time")
    if new is not None and new.number("rope_theta", 0, 1e12, default=0.0):
        theta = new.number("rope_theta", 1.001, 1e12)
        read.only("rope_theta", theta, int(theta))
    else:
        theta = read.number("rope_theta", 1.001, 1e12)
    scaling = new or old
    if scaling is None:
        return theta, None
    kinds = {scaling.text("rope_type"), scaling.text("type")} - {None}
    if kinds == {"default"}:
        scaling.finish()
        return theta, None
    if kinds != {"yarn"}:
        key = "rope_type" if scaling.text("rope_type") else "type"
        raise scaling.unsupported(key, "only 'yarn' and 'default' are implemented")
    scaling.only("truncate", True)
    yarn = Yarn(
        factor=scaling.number("factor", 1.0, 1e6),
        original_context_tokens=scaling.integer("original_max_position_embeddings", 1, 1 << 30),
        beta_fast=scaling.number("beta_fast", 1e-3, 1e6, default=32.0),
        beta_slow=scaling.number("beta_slow", 1e-3, 1e6, default=1.0),
        mscale=scaling.number("mscale", 0.0, 100.0, default=1.0),
        mscale_all_dim=scaling.number("mscale_all_dim", 0.0, 100.0, default=0.0),
    )
    if yarn.beta_fast < yarn.beta_slow:
        raise scaling.unsupported("beta_fast", f"it must not be below beta_slow {yarn.beta_slow}")
    scaling.finish()
    return theta, yarn
