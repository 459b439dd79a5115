"""The metadata of a GGUF file as a ModelSpec; what would be computed wrongly is refused.

The keys are those of the format's description (docs/gguf.md of ggml) and of the public converter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from moechat.errors import ArchitectureUnsupported, CheckpointDamaged
from moechat.models.bounds import MAX_LAYERS, MAX_SIZE
from moechat.models.config_reader import ConfigReader
from moechat.models.gguf.end_tokens import bos_id, end_ids
from moechat.models.gguf.rope import read_ropes
from moechat.models.gguf.routing import read_routing
from moechat.models.gguf.traits import ARCHITECTURES, GGUFSource, Traits
from moechat.models.latent_attention import LATENT_NORM_EPS
from moechat.models.spec import GroupedAttention, LatentAttention, LayerSpec, ModelSpec

# Keys that change nothing in inference.
_HARMLESS = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")
_PATTERN = "attention.sliding_window_pattern"
# Gemma 2 and 3 with 27B parameters, told by their layers, scale scores by hidden size over heads.
_SCALED_BY_HEADS = {("gemma2", 46), ("gemma3", 62)}


def architecture_of(source: GGUFSource) -> str:
    """general.architecture, one of ARCHITECTURES. Raises ArchitectureUnsupported."""
    name = source.metadata.get("general.architecture")
    if isinstance(name, str) and name in ARCHITECTURES:
        return name
    raise ArchitectureUnsupported(
        f"the GGUF file holds a model of the architecture {ascii(name)[:80]}",
        f"moechat implements {', '.join(sorted(ARCHITECTURES))}",
    )


def read_spec(source: GGUFSource) -> ModelSpec:
    """The model's dimensions. Raises ArchitectureUnsupported, naming the key, CheckpointDamaged."""
    name = architecture_of(source)
    traits, read = ARCHITECTURES[name], _reader(source.metadata, name)
    num_mtp_layers = read.integer("nextn_predict_layers", 0, 16, default=0)
    num_layers = read.integer("block_count", num_mtp_layers + 1, MAX_LAYERS) - num_mtp_layers
    num_heads = read.integer("attention.head_count", 1, 4096)
    hidden_size = read.integer("embedding_length", 1, MAX_SIZE)
    vocab_size = _vocab_size(source)
    attention: LatentAttention | GroupedAttention
    if traits.latent:
        attention, rotated = _latent_attention(read, num_heads)
        head_dim = attention.nope_dim + attention.rope_dim
    else:
        attention, rotated = _grouped_attention(read, hidden_size, num_heads)
        head_dim = attention.head_dim
    scaled_dim = hidden_size // num_heads if (name, num_layers) in _SCALED_BY_HEADS else head_dim
    slides = _sliding_layers(read, source.metadata, name, traits, num_layers)
    window = read.integer("attention.sliding_window", 0, 1 << 30, default=traits.default_window)
    ropes = read_ropes(read, source, traits, rotated, has_windows=window > 0)
    moe, first_moe_layer = read_routing(read, source, traits, num_layers, hidden_size)
    dense_size = {} if moe is None else {"default": moe.intermediate_size}
    read.only("attention.causal", True)
    spec = ModelSpec(
        architecture="gguf",
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        num_heads=num_heads,
        intermediate_size=read.integer("feed_forward_length", 1, MAX_SIZE, **dense_size),
        attention=attention,
        layers=tuple(
            LayerSpec(
                window=window if slides[layer] else 0,
                rope=ropes.of_windows if window and slides[layer] else 0,
                moe=layer >= first_moe_layer,
            )
            for layer in range(num_layers)
        ),
        ropes=ropes.ropes,
        softmax_scale=ropes.softmax_factor
        * read.number("attention.scale", 1e-6, 1e3, default=scaled_dim**-0.5),
        rms_norm_eps=read.number("attention.layer_norm_rms_epsilon", 1e-12, 1e-1),
        context_tokens=ropes.context_tokens,
        end_ids=end_ids(source.metadata, vocab_size),
        bos_id=bos_id(source.metadata, vocab_size),
        moe=moe,
        activation=traits.activation,
        activation_limit=traits.activation_limit,
        activation_alpha=traits.activation_alpha,
        embedding_scale=math.sqrt(hidden_size) if traits.scaled_embedding else 1.0,
        attention_softcap=read.number(
            "attn_logit_softcapping", 0.0, 1e6, default=traits.attention_softcap
        ),
        final_softcap=read.number(
            "final_logit_softcapping", 0.0, 1e6, default=traits.final_softcap
        ),
        tied_embeddings="output.weight" not in source.tensors,
        num_mtp_layers=num_mtp_layers,
    )
    read.finish(_HARMLESS)
    return spec


def _reader(metadata: Mapping[str, Any], name: str) -> ConfigReader:
    """The architecture's own keys without their prefix.

    Values of each layer that are all equal are one value; ConfigReader refuses other arrays.
    """
    values: dict[str, Any] = {}
    for key, value in metadata.items():
        key, is_own = key.removeprefix(f"{name}."), key.startswith(f"{name}.")
        is_array = isinstance(value, np.ndarray)
        if not is_own or (is_array and key == _PATTERN):
            continue
        if is_array:
            same = 0 < len(value) <= MAX_LAYERS and bool((value == value[0]).all())
            value = value[0].item() if same else value[:MAX_LAYERS].tolist()
        values[key] = value
    return ConfigReader(values, f"the GGUF file's {name}.*")


def _vocab_size(source: GGUFSource) -> int:
    """Rows of the embedding: the metadata's own numbers may leave out padding."""
    embedding = source.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointDamaged("the GGUF file holds no usable token_embd.weight")
    return embedding.shape[0]


def _grouped_attention(
    read: ConfigReader, hidden_size: int, num_heads: int
) -> tuple[GroupedAttention, int]:
    """Dimensions, and how many of each head are rotated."""
    head_dim = read.integer("attention.key_length", 1, 4096, default=hidden_size // num_heads)
    read.only("attention.value_length", head_dim)
    for kind in ("key", "value"):
        read.only(f"attention.{kind}_length_swa", head_dim)
    num_kv_heads = read.integer("attention.head_count_kv", 1, num_heads, default=num_heads)
    if num_heads % num_kv_heads:
        raise read.unsupported("attention.head_count_kv", f"it must divide the {num_heads} heads")
    rotated = read.integer("rope.dimension_count", 2, head_dim, default=head_dim)
    read.only("rope.dimension_count_swa", rotated)
    if rotated % 2:
        raise read.unsupported("rope.dimension_count", "rotation needs an even number")
    clip = read.number("attention.clamp_kqv", 0.0, 1e6, default=0.0)
    return GroupedAttention(num_kv_heads=num_kv_heads, head_dim=head_dim, clip=clip), rotated


def _latent_attention(read: ConfigReader, num_heads: int) -> tuple[LatentAttention, int]:
    """Dimensions, and how many of each head are rotated.

    Newer files describe the absorbed form (one key head, of the latent's size) and have keys of
    their own for the sizes of a head; in older ones the usual keys hold these.
    """
    read.only("attention.head_count_kv", 1, num_heads)
    old_key = read.integer("attention.key_length", 1, MAX_SIZE)
    old_value = read.integer("attention.value_length", 1, MAX_SIZE)
    head_dim = read.integer("attention.key_length_mla", 1, 4096, default=old_key)
    v_dim = read.integer("attention.value_length_mla", 1, 4096, default=old_value)
    rope_dim = read.integer("rope.dimension_count", 2, 4096)
    if rope_dim % 2 or rope_dim >= head_dim:
        raise read.unsupported("rope.dimension_count", f"it must be even and below {head_dim}")
    attention = LatentAttention(
        q_lora_rank=read.integer("attention.q_lora_rank", 0, MAX_SIZE, default=0),
        kv_lora_rank=read.integer("attention.kv_lora_rank", 1, MAX_SIZE),
        nope_dim=head_dim - rope_dim,
        rope_dim=rope_dim,
        v_dim=v_dim,
        norm_eps=LATENT_NORM_EPS,
    )
    return attention, rope_dim


def _sliding_layers(
    read: ConfigReader, metadata: Mapping[str, Any], name: str, traits: Traits, num_layers: int
) -> list[bool]:
    """Which layers have a window, if there is one: by the file's pattern or the architecture's."""
    stated = metadata.get(f"{name}.{_PATTERN}")
    if isinstance(stated, np.ndarray):
        if len(stated) < num_layers:
            raise ArchitectureUnsupported(
                f"the GGUF file's {_PATTERN} has {len(stated)} entries",
                f"one for each of the {num_layers} layers is needed",
            )
        return [bool(entry) for entry in stated[:num_layers]]
    period = read.integer(_PATTERN, 0, MAX_LAYERS, default=traits.window_period)
    return [period == 0 or layer % period < period - 1 for layer in range(num_layers)]
