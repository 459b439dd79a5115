"""A model folder becomes a native model: spec, mapped tensors, views by role."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moechat import _native
from moechat.errors import from_native
from moechat.models.architectures import bind_tensors, load_spec
from moechat.models.spec import BoundTensor, ModelSpec
from moechat.weights.mapped import Checkpoint


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to compute. ``checkpoint`` owns the mappings that ``native`` points into."""

    spec: ModelSpec
    checkpoint: Checkpoint
    native: _native.Model


def load_model(folder: Path, compute: str) -> LoadedModel:
    """Open ``folder`` (Hugging Face layout). Nothing is converted; only norms are copied.

    Raises ModelNotFound, CheckpointDamaged or ArchitectureUnsupported.
    """
    spec = load_spec(folder)
    checkpoint = Checkpoint.open(folder)
    try:
        weights = {role: _weight(bound) for role, bound in bind_tensors(spec, checkpoint).items()}
        native = _native.Model(
            dims=_dims(spec),
            rope_inverse_frequencies=list(spec.rope_inverse_frequencies),
            num_layers=spec.num_layers,
            compute=compute,
            weights=weights,
        )
    except _native.NativeError as error:
        raise from_native(*error.args) from error
    return LoadedModel(spec, checkpoint, native)


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
    values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    del values["rope_inverse_frequencies"]
    return values


def _weight(bound: BoundTensor) -> _native.MatrixView | NDArray[np.float32]:
    array = bound.weight.array
    if array.ndim == 1:
        return _float32(array)
    scale = bound.scale.array if bound.scale is not None else None
    return _native.MatrixView(bound.format, array, scale)


def _float32(array: NDArray[Any]) -> NDArray[np.float32]:
    """A small vector as float32: BF16 bits are widened exactly."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)
