"""The part of config.json that decoder models share."""

from __future__ import annotations

from collections.abc import Sequence

from moechat.models.bounds import MAX_LAYERS, MAX_SIZE, MAX_TOKENS
from moechat.models.config_reader import ConfigReader
from moechat.models.rope import RopeSettings
from moechat.models.spec import (
    GroupedAttention,
    LatentAttention,
    LayerSpec,
    ModelSpec,
    MoeSpec,
    Rope,
)

# Keys that change nothing in inference, in any family: provenance, training, output options, other
# tasks, the element type, which each tensor states itself, and the checkpoint's own code, which is
# never run.
HARMLESS = (
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "aux_loss_alpha",
    "cache_implementation",
    "dtype",
    "ep_size",
    "id2label",
    "initializer_range",
    "label2id",
    "max_length",
    "max_sequence_length",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "return_dict",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "sep_token_id",
    "seq_aux",
    "tokenizer_class",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
)
_FULL, _SLIDING = "full_attention", "sliding_attention"
_MAX_WINDOW_LAYERS = 28  # what dense Qwen files without max_window_layers mean


def decoder_spec(
    read: ConfigReader,
    generation: ConfigReader,
    architecture: str,
    *,
    attention: LatentAttention | GroupedAttention,
    rope: RopeSettings,
    ropes: tuple[Rope, ...],
    softmax_scale: float,
    layers: tuple[LayerSpec, ...],
    moe: MoeSpec | None = None,
    tied: bool = False,
) -> ModelSpec:
    """A ModelSpec of what the family found and of the keys that all families have.

    ``rope`` is the one that decides over the context; ``tied`` is what a config without
    tie_word_embeddings means. Raises ArchitectureUnsupported, naming the key.
    """
    read.only("is_decoder", False, True)  # what it is in any case
    read.only("is_encoder_decoder", False)
    read.only("add_cross_attention", False)
    vocab_size = read.integer("vocab_size", 1, 1 << 24)
    bos_ids = read.token_ids("bos_token_id", vocab_size)
    end_ids = generation.token_ids("eos_token_id", vocab_size)
    end_ids += read.token_ids("eos_token_id", vocab_size)
    return ModelSpec(
        architecture=architecture,
        hidden_size=hidden_size(read),
        vocab_size=vocab_size,
        num_heads=num_heads(read),
        intermediate_size=read.integer("intermediate_size", 1, MAX_SIZE),
        attention=attention,
        layers=layers,
        ropes=ropes,
        softmax_scale=softmax_scale,
        rms_norm_eps=read.number("rms_norm_eps", 1e-12, 1e-1),
        context_tokens=rope.context_tokens(read.integer("max_position_embeddings", 1, MAX_TOKENS)),
        end_ids=tuple(dict.fromkeys(end_ids)),
        bos_id=bos_ids[0] if bos_ids else None,
        moe=moe,
        tied_embeddings=read.boolean("tie_word_embeddings", default=tied),
    )


def grouped_spec(
    read: ConfigReader,
    generation: ConfigReader,
    architecture: str,
    *,
    rope: RopeSettings,
    windows: Sequence[int] = (),
    sparse: Sequence[bool] = (),
    moe: MoeSpec | None = None,
    tied: bool = False,
) -> ModelSpec:
    """A ModelSpec with grouped-query attention and one rope, scores scaled by 1 / sqrt(head_dim).

    ``windows`` and ``sparse`` (layers with experts) are one a layer; empty: none.
    """
    attention = grouped_attention(read)
    rotated = int(attention.head_dim * rope.rotated_share)
    if rotated < 2 or rotated % 2:
        raise read.unsupported("partial_rotary_factor", "it must leave an even part of a head")
    layers = num_layers(read)
    return decoder_spec(
        read,
        generation,
        architecture,
        attention=attention,
        rope=rope,
        ropes=(rope.rope(attention.head_dim),),
        softmax_scale=attention.head_dim**-0.5,
        layers=tuple(
            LayerSpec(window=window, moe=moe_layer)
            for window, moe_layer in zip(windows or [0] * layers, sparse or [False] * layers)
        ),
        moe=moe,
        tied=tied,
    )


def grouped_attention(read: ConfigReader) -> GroupedAttention:
    """Heads, key-value heads, and the size of a head: head_dim or its share of hidden_size."""
    heads = num_heads(read)
    kv_heads = read.integer("num_key_value_heads", 1, heads, default=heads)
    if heads % kv_heads:
        raise read.unsupported("num_key_value_heads", f"it must divide the {heads} heads")
    if not read.has("head_dim") and hidden_size(read) % heads:
        raise read.unsupported("hidden_size", f"it must be a multiple of the {heads} heads")
    head_dim = read.integer("head_dim", 2, 4096, default=hidden_size(read) // heads)
    if head_dim % 2:
        raise read.unsupported("head_dim", "rotation needs an even number")
    return GroupedAttention(num_kv_heads=kv_heads, head_dim=head_dim)


def hidden_size(read: ConfigReader) -> int:
    """hidden_size within bounds."""
    return read.integer("hidden_size", 1, MAX_SIZE)


def num_heads(read: ConfigReader) -> int:
    """num_attention_heads within bounds."""
    return read.integer("num_attention_heads", 1, 4096)


def num_layers(read: ConfigReader) -> int:
    """num_hidden_layers within bounds."""
    return read.integer("num_hidden_layers", 1, MAX_LAYERS)


def sliding_layers(read: ConfigReader, otherwise: Sequence[bool]) -> tuple[bool, ...]:
    """Which layers see a window only: by layer_types, ``otherwise`` by the family's rule."""
    if not read.has("layer_types"):
        return tuple(otherwise)
    types = read.texts("layer_types", _FULL, _SLIDING)
    if len(types) != len(otherwise):
        raise read.unsupported("layer_types", f"one for each of {len(otherwise)} layers is needed")
    return tuple(kind == _SLIDING for kind in types)


def window_size(read: ConfigReader) -> int:
    """sliding_window: how many positions a sliding layer sees, its own included."""
    return read.integer("sliding_window", 1, MAX_TOKENS)


def same_window(read: ConfigReader, absent: int) -> tuple[int, ...]:
    """Every layer has the window sliding_window, null for none; ``absent`` when it is not there."""
    window = 0 if read.mentions("sliding_window") else absent
    if read.has("sliding_window"):
        window = window_size(read)
    return (window,) * num_layers(read)


def window_by_flag(read: ConfigReader) -> tuple[int, ...]:
    """The window of each layer as dense Qwen models give it, 0 for none.

    With use_sliding_window, layers from max_window_layers on slide.
    """
    layers = num_layers(read)
    first = read.integer("max_window_layers", 0, 4096, default=_MAX_WINDOW_LAYERS)
    used = read.boolean("use_sliding_window", default=False)
    window = window_size(read) if used else read.integer("sliding_window", 0, MAX_TOKENS, 0)
    slides = sliding_layers(read, [used and layer >= first for layer in range(layers)])
    if any(slides) and not used:
        raise read.unsupported("layer_types", "use_sliding_window is not true")
    return tuple(window if slide else 0 for slide in slides)


def no_window(read: ConfigReader) -> None:
    """Refuse windows where versions of the reference disagree on which layers have them."""
    read.only("use_sliding_window", False)
    if any(window_by_flag(read)):
        raise read.unsupported("layer_types", "only full attention is implemented")
