"""Multi-head latent attention: its keys in config.json and its tensors."""

from __future__ import annotations

from moechat.models.bounds import MAX_SIZE
from moechat.models.config_reader import ConfigReader
from moechat.models.decoder_config import num_heads
from moechat.models.decoder_tensors import linear, vector
from moechat.models.rope import RopeSettings
from moechat.models.spec import LatentAttention, ModelSpec, TensorSpec

# The norms of the two latents use this whatever rms_norm_eps says.
LATENT_NORM_EPS = 1e-6


def latent_attention(read: ConfigReader) -> LatentAttention:
    """The dimensions. Raises ArchitectureUnsupported, naming the key."""
    heads = num_heads(read)
    if read.integer("num_key_value_heads", 1, 4096, default=heads) != heads:
        raise read.unsupported("num_key_value_heads", f"it must equal the {heads} heads")
    nope_dim = read.integer("qk_nope_head_dim", 1, 4096)
    rope_dim = read.integer("qk_rope_head_dim", 2, 4096)
    if rope_dim % 2:
        raise read.unsupported("qk_rope_head_dim", "rotation needs an even number")
    read.only("head_dim", rope_dim)
    read.only("qk_head_dim", nope_dim + rope_dim)
    read.only("attention_bias", False)
    return LatentAttention(
        q_lora_rank=read.integer("q_lora_rank", 0, MAX_SIZE, default=0),
        kv_lora_rank=read.integer("kv_lora_rank", 1, MAX_SIZE),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=read.integer("v_head_dim", 1, 4096),
        norm_eps=LATENT_NORM_EPS,
    )


def latent_softmax_scale(attention: LatentAttention, rope: RopeSettings) -> float:
    """1 / sqrt of a query head's size, times what YaRN's mscale_all_dim asks for."""
    plain: float = (attention.nope_dim + attention.rope_dim) ** -0.5
    return plain * rope.softmax_factor


def latent_tensors(spec: ModelSpec, role: str, name: str) -> list[TensorSpec]:
    """The attention tensors of the layer with these prefixes of roles and names."""
    sizes = spec.attention
    assert isinstance(sizes, LatentAttention)
    name += "self_attn."
    hidden, heads = spec.hidden_size, spec.num_heads
    query_rows = heads * (sizes.nope_dim + sizes.rope_dim)
    latent, rank = sizes.kv_lora_rank, sizes.q_lora_rank
    if rank:
        query = [
            linear(role + "q_a", name + "q_a_proj", rank, hidden),
            vector(role + "q_a_norm", name + "q_a_layernorm.weight", rank),
            linear(role + "q_b", name + "q_b_proj", query_rows, rank),
        ]
    else:
        query = [linear(role + "q", name + "q_proj", query_rows, hidden)]
    key_value_rows = heads * (sizes.nope_dim + sizes.v_dim)
    return [
        *query,
        linear(role + "kv_a", name + "kv_a_proj_with_mqa", latent + sizes.rope_dim, hidden),
        vector(role + "kv_a_norm", name + "kv_a_layernorm.weight", latent),
        linear(role + "kv_b", name + "kv_b_proj", key_value_rows, latent),
        linear(role + "o", name + "o_proj", hidden, heads * sizes.v_dim),
    ]
