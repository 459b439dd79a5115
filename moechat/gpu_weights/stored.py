"""A model's weights as runs of stored bytes: what is copied to a device, and how it is to be read.

Nothing is copied here but vectors. Experts of a layer are kept together, whether the checkpoint
stores them in one tensor or in many.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moechat.errors import BadParameter
from moechat.models.spec import BoundTensor, TensorView

Bytes = NDArray[np.uint8]
STREAMED = ("f32", "f16", "bf16", "fp8", "int4", "mxfp4")
_EXPERT = re.compile(r"layers\.(\d+)\.experts\.(\d+|\*)\.(gate|up|down|gate_up)(_bias)?")


@dataclass(frozen=True, slots=True)
class Layout:
    """How the bytes of a stored matrix are to be read; that of models.spec.BoundTensor.

    ``rows`` x ``cols`` elements as stored. ``grid``: its scales, one a ``block``, of safetensors
    type ``scale_dtype``; "" when the format has none. ``transposed``: rows are inputs.
    """

    format: str
    rows: int
    cols: int
    block: tuple[int, int] = (1, 1)
    grid: tuple[int, int] = (0, 0)
    scale_dtype: str = ""
    transposed: bool = False

    @property
    def outputs(self) -> int:
        """Of the linear layer."""
        return self.cols if self.transposed else self.rows

    @property
    def inputs(self) -> int:
        """Of the linear layer."""
        return self.rows if self.transposed else self.cols


@dataclass(frozen=True, slots=True, eq=False)
class StoredMatrix:
    """``data`` and ``scale``: read-only uint8 [bytes] views of a mapping, perhaps unaligned."""

    layout: Layout
    data: Bytes
    scale: Bytes | None = None


@dataclass(frozen=True, slots=True)
class Half:
    """A matrix, or one of two whose outputs alternate in it: ``first`` 0 or 1, None for all."""

    key: str
    first: int | None = None


@dataclass(slots=True)
class ExpertStack:
    """The experts of one layer: ``parts`` by name ("gate", "up" or "gate_up", and "down").

    Each part is a list of matrices of one layout, an expert each. ``biases``: float32 [E, outputs]
    by name ("gate", "up", "down"); absent when the model has none.
    """

    parts: dict[str, list[StoredMatrix]] = field(default_factory=dict)
    biases: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    @property
    def num_experts(self) -> int:
        """In every part."""
        return len(self.parts["down"])


class StoredWeights:
    """All tensors of a model by what becomes of them.

    ``vectors``: float32 by role. ``matrices``: what is stored, by a key of its own; ``roles``:
    where in them a role is. ``experts``: by layer.
    """

    def __init__(self) -> None:
        self.vectors: dict[str, NDArray[np.float32]] = {}
        self.matrices: dict[str, StoredMatrix] = {}
        self.roles: dict[str, Half] = {}
        self.experts: dict[int, ExpertStack] = {}

    @classmethod
    def of(cls, tensors: Iterable[BoundTensor]) -> StoredWeights:
        """Sort bound tensors. BadParameter for formats that cannot be streamed yet."""
        weights, singles = cls(), dict[int, dict[str, dict[int, BoundTensor]]]()
        for bound in tensors:
            expert = _EXPERT.fullmatch(bound.spec.role)
            if expert is None:
                weights._add(bound)
                continue
            layer, number, name, bias = expert.groups()
            if number != "*":
                of_layer = singles.setdefault(int(layer), {})
                of_layer.setdefault(name + (bias or ""), {})[int(number)] = bound
            else:
                weights._add_stack(int(layer), name, bound, bool(bias))
        for layer_number, of_layer in singles.items():
            for name, by_number in of_layer.items():
                weights._add_singles(layer_number, name, [by_number[i] for i in sorted(by_number)])
        return weights

    def layer_keys(self, layer: int) -> list[str]:
        """Keys of the layer's matrices, experts not counted."""
        prefix = f"layers.{layer}."
        return [key for key in self.matrices if key.startswith(prefix)]

    def keep_experts(self, experts: slice) -> None:
        """Forget the others; those left count from 0. A layer that has none left has no stack."""
        for layer, stack in list(self.experts.items()):
            stack.parts = {name: part[experts] for name, part in stack.parts.items()}
            stack.biases = {name: values[experts] for name, values in stack.biases.items()}
            if not stack.num_experts:
                del self.experts[layer]

    def _add(self, bound: BoundTensor) -> None:
        role = bound.spec.role
        if not bound.spec.stacked and len(bound.spec.shape) == 1:
            for name, half in _halves(bound):
                values = _vector(bound, bound.data)
                self.vectors[name] = values if half is None else values[half::2].copy()
            return
        for number, matrix in enumerate(_matrices(bound)):
            key = role.replace("*", str(number))
            self.matrices[key] = matrix
            for name, half in _halves(bound):
                self.roles[name.replace("*", str(number))] = Half(key, half)

    def _add_stack(self, layer: int, name: str, bound: BoundTensor, bias: bool) -> None:
        stack = self.experts.setdefault(layer, ExpertStack())
        if bias:
            values = _vector(bound, bound.data)
            if bound.spec.interleaved:
                stack.biases["gate"] = np.ascontiguousarray(values[:, 0::2])
                stack.biases["up"] = np.ascontiguousarray(values[:, 1::2])
            else:
                stack.biases[name] = values
        else:
            stack.parts[name] = list(_matrices(bound))

    def _add_singles(self, layer: int, name: str, tensors: list[BoundTensor]) -> None:
        stack = self.experts.setdefault(layer, ExpertStack())
        if name.endswith("_bias"):
            values = np.stack([_vector(bound, bound.data) for bound in tensors])
            stack.biases[name.removesuffix("_bias")] = values
            return
        matrices = [matrix for bound in tensors for matrix in _matrices(bound)]
        if len({matrix.layout for matrix in matrices}) > 1:
            raise _not_yet(tensors[0], "the experts of a layer are stored in different ways")
        stack.parts[name] = matrices


def _halves(bound: BoundTensor) -> Iterator[tuple[str, int | None]]:
    """Roles of a tensor, and which half of the outputs each has."""
    role = bound.spec.role
    if not bound.spec.interleaved:
        yield role, None
        return
    prefix, suffix = role.rsplit("gate_up", 1)
    yield f"{prefix}gate{suffix}", 0
    yield f"{prefix}up{suffix}", 1


def _matrices(bound: BoundTensor) -> Iterator[StoredMatrix]:
    """One for each of a stack, or the one."""
    if bound.format not in STREAMED or bound.zeros is not None:
        raise _not_yet(bound, f"it is stored as {bound.format}")
    count = bound.spec.shape[0] if bound.spec.stacked else 1
    shape = bound.spec.shape[1:] if bound.spec.stacked else bound.spec.shape
    rows, cols = shape
    if bound.format == "mxfp4" and bound.spec.transposed:
        rows, cols = cols, rows  # quantised_parts: blocks stand the other way round
    layout = Layout(bound.format, rows, cols, transposed=bound.transposed)
    data, scale = _parts(bound.data, count), None
    if bound.scale is not None:
        block_rows, block_cols = bound.block
        grid = (-(-rows // block_rows), -(-cols // block_cols))
        layout = Layout(
            bound.format, rows, cols, bound.block, grid, bound.scale.dtype, bound.transposed
        )
        scale = _parts(bound.scale, count)
    for number in range(count):
        yield StoredMatrix(layout, data[number], scale[number] if scale is not None else None)


def _parts(tensor: TensorView, count: int) -> NDArray[np.uint8]:
    """The tensor's bytes in place, uint8 [count, bytes of one]."""
    flat: NDArray[np.uint8] = tensor.array.reshape(-1).view(np.uint8)
    return flat.reshape(count, -1)


def _vector(bound: BoundTensor, tensor: TensorView) -> NDArray[np.float32]:
    """A small tensor as float32 of its shape, ``added`` included; BF16 and F16 exactly."""
    array = tensor.array
    if bound.format == "bf16":
        values = (array.astype(np.uint32) << 16).view(np.float32)
    elif bound.format == "f16":
        values = array.view(np.float16).astype(np.float32)
    else:
        values = array.astype(np.float32)
    values = np.asarray(values, np.float32).reshape(bound.spec.shape)
    return values + np.float32(bound.spec.added) if bound.spec.added else values


def _not_yet(bound: BoundTensor, why: str) -> BadParameter:
    return BadParameter(
        f"{bound.spec.role} cannot be streamed to a GPU yet",
        why,
        'Use the CPU: device="cpu"',
    )


def total_bytes(matrices: Mapping[str, StoredMatrix]) -> int:
    """Stored bytes, scales included."""
    return sum(
        len(matrix.data) + (len(matrix.scale) if matrix.scale is not None else 0)
        for matrix in matrices.values()
    )
