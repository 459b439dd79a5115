"""What a GGUF file's general.architecture means beyond what its metadata says.

Facts of the models themselves and of how the public converter stores them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from moechat.models.spec import Activation, Scoring, TensorSource

# A tensor must be there, may be there, or would be left over.
Presence = Literal["required", "optional", "absent"]


class GGUFSource(TensorSource, Protocol):
    """What reading a model needs of GGUF files; ``weights.gguf_file.GGUFCheckpoint`` is one."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """int, float, bool, str, numpy array or sequence of str by key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """One architecture.

    ``interleaved``: q and k are stored for pairs (2 i, 2 i + 1). ``whole_row_norms``: q and k are
    normed before they are split into heads. ``ffn_norm`` is its tensor's name. ``window_period`` n:
    every n-th layer sees everything, the others a window; 0: all have the window, if there is one.
    ``window_theta``: the base in layers with a window, whose positions are not scaled;
    0: as elsewhere. ``rope_factors``: rope_freqs.weight divides the frequencies.
    """

    latent: bool = False
    interleaved: bool = False
    moe: Presence = "absent"
    scoring: Scoring = "softmax"
    normalise_weights: bool = False
    qkv_bias: Presence = "optional"
    o_bias: Presence = "absent"
    qk_norm: Presence = "absent"
    whole_row_norms: bool = False
    sinks: bool = False
    shared_gate: bool = False
    expert_bias: bool = False
    post_norms: bool = False
    ffn_norm: str = "ffn_norm"
    window_period: int = 0
    default_window: int = 0
    activation: Activation = "silu"
    activation_limit: float = 0.0
    activation_alpha: float = 0.0
    scaled_embedding: bool = False
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    rope_factors: bool = False
    window_theta: float = 0.0
    truncated_yarn: bool = True


ARCHITECTURES = {
    # The converter reorders the rows of q and k from halves to pairs.
    "llama": Traits(
        interleaved=True,
        moe="optional",
        normalise_weights=True,
        o_bias="optional",
        rope_factors=True,
    ),
    "qwen2": Traits(qkv_bias="required"),
    "qwen2moe": Traits(qkv_bias="required", moe="required", shared_gate=True),
    "qwen3": Traits(qk_norm="required"),
    "qwen3moe": Traits(qk_norm="required", moe="required", normalise_weights=True),
    # Gemma's norms multiply by 1 + w; these files hold the sum.
    "gemma2": Traits(
        qkv_bias="absent",
        post_norms=True,
        window_period=2,
        default_window=4096,
        activation="gelu_tanh",
        scaled_embedding=True,
        attention_softcap=50.0,
        final_softcap=30.0,
    ),
    "gemma3": Traits(
        qkv_bias="absent",
        qk_norm="required",
        post_norms=True,
        window_period=6,
        window_theta=10_000.0,
        activation="gelu_tanh",
        scaled_embedding=True,
    ),
    "olmoe": Traits(qkv_bias="absent", qk_norm="required", whole_row_norms=True, moe="required"),
    "glm4moe": Traits(
        qk_norm="optional", moe="required", scoring="sigmoid", ffn_norm="post_attention_norm"
    ),
    "deepseek2": Traits(latent=True, interleaved=True, moe="optional"),
    "gpt-oss": Traits(
        moe="required",
        scoring="softmax_chosen",
        qkv_bias="required",
        o_bias="required",
        sinks=True,
        expert_bias=True,
        ffn_norm="post_attention_norm",
        window_period=2,
        activation="swiglu_clamped",
        activation_limit=7.0,
        activation_alpha=1.702,
        truncated_yarn=False,
    ),
}
