"""The dimensions of a model and of its tensors, whatever its architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

Format = Literal["f32", "bf16", "fp8_block"]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything the forward pass needs to know besides the weights.

    ``q_lora_rank`` 0 means a plain query projection. ``rope_inverse_frequencies`` has
    ``qk_rope_head_dim / 2`` radians a position, scaling applied; cos and sin are multiplied by
    ``rope_amplitude`` and attention scores by ``softmax_scale``. ``end_ids`` holds every end token
    that config.json or generation_config.json names.
    """

    architecture: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    num_dense_layers: int
    num_groups: int
    num_groups_kept: int
    normalise_weights: bool
    routed_scaling: float
    rms_norm_eps: float
    latent_norm_eps: float
    rope_inverse_frequencies: tuple[float, ...]
    rope_amplitude: float
    softmax_scale: float
    context_tokens: int
    tied_embeddings: bool
    bos_id: int | None
    end_ids: tuple[int, ...]
    num_mtp_layers: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor that a model must have.

    ``role`` is the key by which the native model gets it ("layers.3.experts.17.gate"); ``scale``
    names the float32 tensor of block scales that goes with it when it is stored as fp8_block.
    """

    name: str
    shape: tuple[int, ...]
    formats: tuple[Format, ...]
    role: str
    scale: str | None = None


class TensorView(Protocol):
    """What binding needs of a stored tensor; ``weights.mapped.StoredTensor`` is one."""

    @property
    def name(self) -> str:
        """Name in the checkpoint."""

    @property
    def dtype(self) -> str:
        """safetensors' name of the element type."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes in elements."""

    @property
    def file(self) -> Path:
        """The file that holds it."""

    @property
    def array(self) -> Any:
        """Read-only numpy view of the file's bytes."""


class TensorSource(Protocol):
    """What binding needs of a checkpoint; ``weights.mapped.Checkpoint`` is one."""

    @property
    def tensors(self) -> Mapping[str, TensorView]:
        """Every stored tensor by name."""


@dataclass(frozen=True, slots=True)
class BoundTensor:
    """A tensor of the model with the bytes that were found for it.

    ``scale``: float32 [ceil(rows / 128), ceil(cols / 128)], multiplied; only for fp8_block.
    """

    spec: TensorSpec
    weight: TensorView
    scale: TensorView | None
    format: Format
