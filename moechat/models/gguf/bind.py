"""The tensors of a GGUF file become those of a model, each with a shape and a type that fit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moechat.errors import ArchitectureUnsupported, CheckpointDamaged
from moechat.models.gguf.config import architecture_of
from moechat.models.gguf.names import is_skipped, tensor_table
from moechat.models.gguf.traits import ARCHITECTURES, GGUFSource
from moechat.models.name_listing import name_listing
from moechat.models.spec import BoundTensor, Format, ModelSpec, TensorSpec, TensorView

_PLAIN: dict[str, Format] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_MATRIX: dict[str, Format] = {
    **_PLAIN,
    "Q8_0": "q8_0",
    "Q4_0": "q4_0",
    "Q5_0": "q5_0",
    "Q4_K": "q4_k",
    "Q5_K": "q5_k",
    "Q6_K": "q6_k",
    "MXFP4": "mxfp4_block",
}


@dataclass(frozen=True, slots=True)
class _Reshaped:
    """A stored tensor under another shape of as many elements and equal rows."""

    view: TensorView
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.view.name

    @property
    def dtype(self) -> str:
        return self.view.dtype

    @property
    def file(self) -> Path:
        return self.view.file

    @property
    def array(self) -> Any:
        array = self.view.array
        return array.reshape(*self.shape[:-1], array.shape[-1])


def bind_tensors(spec: ModelSpec, source: GGUFSource) -> list[BoundTensor]:
    """Every tensor of the model.

    Raises CheckpointDamaged for missing, left-over or misshapen tensors, ArchitectureUnsupported
    for element types that have no kernel.
    """
    name = architecture_of(source)
    traits, stored = ARCHITECTURES[name], source.tensors
    table = tensor_table(spec, traits, stored)
    bound = [_bind(entry, stored[entry.name]) for entry in table if entry.name in stored]
    known = {entry.name for entry in table}
    missing = [entry.name for entry in table if entry.name not in stored]
    left_over = [key for key in stored if key not in known and not is_skipped(spec, traits, key)]
    if missing or left_over:
        parts = [name_listing("missing", missing), name_listing("not expected", left_over)]
        raise CheckpointDamaged(
            f"the tensors are not those that the GGUF file's metadata describes ({name})",
            "; ".join(part for part in parts if part),
        )
    return bound


def _bind(entry: TensorSpec, stored: TensorView) -> BoundTensor:
    formats = _MATRIX if entry.matrix else _PLAIN
    format_ = formats.get(stored.dtype)
    if format_ is None:
        raise ArchitectureUnsupported(
            f"{stored.file} stores {stored.name!a} as {stored.dtype}",
            f"moechat computes with {', '.join(formats)} there",
        )
    data = stored
    if stored.shape != entry.shape:
        if _without_ones(stored.shape) != _without_ones(entry.shape):
            raise CheckpointDamaged(
                f"{stored.file} does not fit its own metadata",
                f"{stored.name!a} has shape {list(stored.shape)} and should have "
                f"{list(entry.shape)}",
            )
        data = _Reshaped(stored, entry.shape)
    return BoundTensor(spec=entry, format=format_, data=data, transposed=entry.transposed)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The format drops slowest dimensions of size 1, and not every writer does."""
    first = next((axis for axis, size in enumerate(shape) if size != 1), len(shape))
    return shape[first:]
