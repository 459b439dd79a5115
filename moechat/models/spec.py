"""What a model is: dimensions, layers and tensors, whatever its architecture and file format.

One forward pass serves every architecture. Where architectures differ, a ``ModelSpec`` declares the
difference: a number, a named rule, or a tensor role that is there or not (biases, q and k norms,
sinks, post norms; docs/adding-a-model.md lists the roles).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

Format = Literal[
    "f32", "f16", "bf16",
    "fp8",  # e4m3 with a scale grid of any block size (128x128, or one a row)
    "mxfp4",  # e2m1 nibbles, low first; E8M0 scales of 32 in a grid of their own
    "int4",  # compressed-tensors pack-quantized, symmetric: int32 of 8 nibbles, value = code - 8
    "awq", "gptq",  # 4 bits, stored [inputs, outputs]
    "q8_0", "q4_0", "q5_0", "q4_k", "q5_k", "q6_k", "mxfp4_block",  # GGUF blocks, scales inside
]  # fmt: skip
Activation = Literal["silu", "gelu_tanh", "swiglu_clamped"]
Scoring = Literal["sigmoid", "softmax", "softmax_chosen"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary embedding: radians a position of each pair, scaling applied.

    cos and sin are multiplied by ``amplitude``. Pairs are (i, i + n) of the 2 n rotated dimensions,
    or (2 i, 2 i + 1) when ``interleaved``. Of a head the last 2 n dimensions are rotated with
    latent attention, the first 2 n with grouped attention.
    """

    inverse_frequencies: tuple[float, ...]
    amplitude: float = 1.0
    interleaved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2 paper, section 2.1).

    ``q_lora_rank`` 0 means a plain query projection; ``norm_eps`` is that of the two latent norms.
    """

    q_lora_rank: int
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    norm_eps: float

    @property
    def kv_segments(self) -> int:
        """Parts of a KV cache slot that are read apart."""
        return 1

    @property
    def kv_width(self) -> int:
        """Elements of one KV cache slot: the latent, then the rotated key."""
        return self.kv_lora_rank + self.rope_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedAttention:
    """Grouped-query attention: ``num_kv_heads`` key and value heads for all query heads.

    ``clip`` > 0 clamps q, k and v to [-clip, clip] after their norms (OLMoE's clip_qkv).
    """

    num_kv_heads: int
    head_dim: int
    clip: float = 0.0

    @property
    def kv_segments(self) -> int:
        """Parts of a KV cache slot that are read apart: the key and the value of each head."""
        return 2 * self.num_kv_heads

    @property
    def kv_width(self) -> int:
        """Elements of one KV cache slot: all keys, then all values."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """What may differ from layer to layer.

    ``window`` w > 0: position i sees the last w positions, itself included; 0: all. ``rope`` is an
    index into ``ModelSpec.ropes``. ``moe``: routed experts in place of one MLP.
    """

    window: int = 0
    rope: int = 0
    moe: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """Routed experts and how they are chosen.

    "sigmoid": DeepSeek-V3's rule; selection adds the tensor ``router_correction``, a group counts
    its best two. "softmax": over all experts, a group counts its best. "softmax_chosen": over the
    logits of the chosen only (gpt-oss). ``normalise_weights`` divides the chosen weights by their
    sum; then ``routed_scaling`` multiplies them. ``shared_intermediate_size`` 0: no shared expert.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    scoring: Scoring = "softmax"
    num_groups: int = 1
    num_groups_kept: int = 1
    normalise_weights: bool = False
    routed_scaling: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Everything the forward pass needs to know besides the weights.

    ``architecture`` is the folder of moechat.models that read it. Softcaps are 0 when there is
    none: s = cap * tanh(s / cap). "swiglu_clamped" is gpt-oss': gate <= limit, |up| <= limit,
    (up + 1) * gate * sigmoid(alpha * gate). ``end_ids`` holds every end token that config.json or
    generation_config.json names.
    """

    architecture: str
    hidden_size: int
    vocab_size: int
    num_heads: int
    intermediate_size: int
    attention: LatentAttention | GroupedAttention
    layers: tuple[LayerSpec, ...]
    ropes: tuple[Rope, ...]
    softmax_scale: float
    rms_norm_eps: float
    context_tokens: int
    end_ids: tuple[int, ...]
    bos_id: int | None = None
    moe: MoeSpec | None = None
    activation: Activation = "silu"
    activation_limit: float = 0.0
    activation_alpha: float = 0.0
    embedding_scale: float = 1.0
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    tied_embeddings: bool = False
    num_mtp_layers: int = 0

    @property
    def num_layers(self) -> int:
        """Decoder layers, multi-token-prediction layers not counted."""
        return len(self.layers)

    @property
    def kv_segments(self) -> int:
        """Parts of a KV cache slot that are read apart."""
        return self.attention.kv_segments

    @property
    def kv_width(self) -> int:
        """Elements of one KV cache slot."""
        return self.attention.kv_width


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor that a model must have, as an unquantised checkpoint stores it.

    ``role`` is the key by which the native model gets it ("layers.3.experts.17.gate"). A ``matrix``
    is a linear layer's weight that a checkpoint may quantise (then its parts have names derived
    from ``name``); others are F32, BF16 or F16.

    ``stacked``: the first axis counts experts (or heads), and the "*" in the role stands for their
    number. ``transposed``: the last two axes are [inputs, outputs]. ``interleaved``: the outputs
    are gate 0, up 0, gate 1, up 1, ...; the role ends in "gate_up" (or "gate_up_bias") and is split
    into two. ``added`` is added to every value of a vector (norms that multiply by 1 + w).
    """

    name: str
    shape: tuple[int, ...]
    role: str
    matrix: bool = False
    stacked: bool = False
    transposed: bool = False
    interleaved: bool = False
    added: float = 0.0


class TensorView(Protocol):
    """What binding needs of a stored tensor; ``weights.mapped.StoredTensor`` is one."""

    @property
    def name(self) -> str:
        """Name in the checkpoint."""

    @property
    def dtype(self) -> str:
        """Element type: safetensors' name for it, or GGUF's ("Q4_K")."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes in elements, slowest first; of GGUF blocks too."""

    @property
    def file(self) -> Path:
        """The file that holds it."""

    @property
    def array(self) -> Any:
        """Read-only numpy view of the file's bytes; of GGUF blocks uint8 [..., bytes of a row]."""


class TensorSource(Protocol):
    """What binding needs of a checkpoint; ``weights.mapped.Checkpoint`` is one."""

    @property
    def tensors(self) -> Mapping[str, TensorView]:
        """Every stored tensor by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundTensor:
    """A tensor of the model with the stored parts that were found for it.

    ``scale``: grid of one scale a ``block`` (rows, columns of the stored matrix), multiplied.
    ``zeros``: packed zero points (awq, gptq). ``group_index``: gptq's g_idx [inputs] when it is not
    simply input // group. ``transposed``: as stored, [inputs, outputs].
    """

    spec: TensorSpec
    format: Format
    data: TensorView
    scale: TensorView | None = None
    zeros: TensorView | None = None
    group_index: TensorView | None = None
    block: tuple[int, int] = (128, 128)
    transposed: bool = False
