"""A model's files become a native model: spec, mapped tensors, views by role."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moechat import _native
from moechat.engine.model_files import ModelFiles, find_model_files
from moechat.errors import ArchitectureUnsupported, from_native
from moechat.models.spec import BoundTensor, LatentAttention, ModelSpec, MoeSpec

Weight = _native.MatrixView | NDArray[np.float32]


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to compute. ``files`` own the mappings that ``native`` points into.

    ``tensors``: all that were bound, where somebody asked to keep them.
    """

    spec: ModelSpec
    files: ModelFiles
    native: _native.Model
    tensors: Sequence[BoundTensor] = ()


def load_model(
    path: Path, compute: str, *, speculate: bool = False, keep_tensors: bool = False
) -> LoadedModel:
    """Open a model folder or GGUF file. Nothing is converted; only vectors are copied.

    ``speculate``: with the multi-token-prediction layer. ``keep_tensors``: for a GPU. Raises
    ModelNotFound, CheckpointDamaged, ArchitectureUnsupported, or BadParameter when there is no such
    layer.
    """
    files = find_model_files(path)
    spec = files.spec
    try:
        tensors = files.bind(speculate)
        weights = {role: weight for tensor in tensors for role, weight in _weights(tensor)}
        native = _native.Model(
            dims=_dims(spec),
            ropes=[
                (list(rope.inverse_frequencies), rope.amplitude, rope.interleaved)
                for rope in spec.ropes
            ],
            layers=[(layer.window, layer.rope) for layer in spec.layers],
            compute=compute,
            weights=weights,
        )
    except _native.NativeError as error:
        name, why = error.args
        if name == "bad-argument":  # the model's own numbers, not what the user asked for
            raise ArchitectureUnsupported(f"{path} cannot be computed", why) from error
        raise from_native(name, why) from error
    return LoadedModel(spec, files, native, tensors if keep_tensors else ())


def choose_instruction_set() -> str:
    """Apply MOECHAT_ISA, if set, and return the name of the instruction set in use."""
    forced = os.environ.get("MOECHAT_ISA")
    if forced:
        try:
            _native.force_instruction_set(forced)
        except _native.NativeError as error:
            raise from_native(*error.args) from error
    return _native.active_instruction_set()


def _dims(spec: ModelSpec) -> dict[str, Any]:
    """The numbers and rules of a spec under the native model's names; 0 where it has none."""
    attention = spec.attention
    latent = attention if isinstance(attention, LatentAttention) else None
    grouped = None if isinstance(attention, LatentAttention) else attention
    moe = spec.moe or MoeSpec(num_experts=0, num_experts_per_token=0, intermediate_size=0)
    return {
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "num_heads": spec.num_heads,
        "q_lora_rank": latent.q_lora_rank if latent else 0,
        "kv_lora_rank": latent.kv_lora_rank if latent else 0,
        "nope_dim": latent.nope_dim if latent else 0,
        "rope_dim": latent.rope_dim if latent else 0,
        "v_dim": latent.v_dim if latent else 0,
        "latent_norm_eps": latent.norm_eps if latent else 0.0,
        "num_kv_heads": grouped.num_kv_heads if grouped else 0,
        "head_dim": grouped.head_dim if grouped else 0,
        "qkv_clip": grouped.clip if grouped else 0.0,
        "softmax_scale": spec.softmax_scale,
        "attention_softcap": spec.attention_softcap,
        "final_softcap": spec.final_softcap,
        "rms_norm_eps": spec.rms_norm_eps,
        "embedding_scale": spec.embedding_scale,
        "activation": spec.activation,
        "activation_limit": spec.activation_limit,
        "activation_alpha": spec.activation_alpha,
        "num_experts": moe.num_experts,
        "num_experts_per_token": moe.num_experts_per_token,
        "num_groups": moe.num_groups,
        "num_groups_kept": moe.num_groups_kept,
        "scoring": moe.scoring,
        "normalise_weights": moe.normalise_weights,
        "routed_scaling": moe.routed_scaling,
    }


def _weights(bound: BoundTensor) -> Iterator[tuple[str, Weight]]:
    """One tensor's parts by role: experts of a stack apart, gate and up apart."""
    arrays = [
        part.array if part is not None else None for part in (bound.data, bound.scale, bound.zeros)
    ]
    if not bound.spec.stacked:
        yield from _split(bound, bound.spec.role, arrays)
        return
    for number in range(bound.spec.shape[0]):
        role = bound.spec.role.replace("*", str(number))
        yield from _split(bound, role, [None if a is None else a[number] for a in arrays])


def _split(
    bound: BoundTensor, role: str, arrays: list[NDArray[Any] | None]
) -> Iterator[tuple[str, Weight]]:
    if not bound.spec.interleaved:
        yield role, _weight(bound, arrays)
        return
    prefix, suffix = role.rsplit("gate_up", 1)
    # Outputs alternate. As rows (or a vector) every second one is taken; as columns the view steps.
    for first, name in enumerate(("gate", "up")):
        if bound.transposed:
            half = [None if a is None else a[..., first::2] for a in arrays]
        else:
            half = [None if a is None else a[first::2] for a in arrays]
        yield f"{prefix}{name}{suffix}", _weight(bound, half)


def _weight(bound: BoundTensor, arrays: list[NDArray[Any] | None]) -> Weight:
    data, scale, zeros = arrays
    assert data is not None
    if data.ndim == 1:
        vector = _float32(data, bound.format)
        return vector + np.float32(bound.spec.added) if bound.spec.added else vector
    if data.ndim == 3:  # MXFP4: [rows, blocks, bytes of a block]
        data = data.reshape(len(data), -1)
    options: dict[str, Any] = {}
    if scale is not None:
        options["scale"] = scale if scale.ndim == 2 else scale.reshape(1, 1)
        options["block"] = bound.block
        options["scale_type"] = _SCALE_TYPES[bound.scale.dtype] if bound.scale else None
    if zeros is not None:
        options["zeros"] = zeros
    if bound.group_index is not None:
        options["group_index"] = bound.group_index.array
    if bound.transposed:
        options["transposed"] = True
        if bound.spec.interleaved:
            options["col_step"] = 2
    if bound.format == "int4":
        options["cols"] = bound.spec.shape[-1]
    try:
        return _native.MatrixView(bound.format, data, **options)
    except _native.NativeError as error:
        raise ArchitectureUnsupported(
            f"{bound.data.file} stores {bound.data.name!a} in a way that moechat cannot use",
            error.args[1],
        ) from error


_SCALE_TYPES = {"F32": "f32", "BF16": "bf16", "F16": "f16", "U8": "e8m0", "F8_E8M0": "e8m0"}


def _float32(array: NDArray[Any], format_: str) -> NDArray[np.float32]:
    """A small vector as float32: BF16 and F16 bits are widened exactly."""
    if format_ == "bf16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    if format_ == "f16":
        return array.view(np.float16).astype(np.float32)
    return array.astype(np.float32)
