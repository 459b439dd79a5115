"""What Gemma 2 and 3 share: norms by 1 + w, four of them a layer, and scales of their own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

from moechat.models.config_reader import ConfigReader
from moechat.models.decoder_tensors import decoder_table, grouped_attention_tensors
from moechat.models.spec import ModelSpec, TensorSpec

_ADDED = 1.0


def with_gemma_scales(read: ConfigReader, spec: ModelSpec) -> ModelSpec:
    """The spec with Gemma's activation and the scales of embeddings and scores."""
    read.only("hidden_act", "gelu_pytorch_tanh")
    read.only("hidden_activation", "gelu_pytorch_tanh")
    read.only("use_bidirectional_attention", False)
    read.boolean("attention_bias", default=False)  # gemma_table asks again
    return replace(
        spec,
        softmax_scale=read.number("query_pre_attn_scalar", 1e-3, 1e6) ** -0.5,
        activation="gelu_tanh",
        embedding_scale=spec.hidden_size**0.5,
    )


def softcap(read: ConfigReader, key: str, absent: float) -> float:
    """A softcap, 0 for none. A file without the key means ``absent``, null means none."""
    return read.number(key, 1e-3, 1e6, default=0.0 if read.mentions(key) else absent)


def gemma_table(
    spec: ModelSpec, read: ConfigReader, qk_norm: Literal["", "head"] = ""
) -> list[TensorSpec]:
    """Every tensor of the model."""
    bias = read.boolean("attention_bias", default=False)
    attention = partial(
        grouped_attention_tensors, qkv_bias=bias, o_bias=bias, qk_norm=qk_norm, added=_ADDED
    )
    return decoder_table(spec, attention, four_norms=True, added=_ADDED)
