"""One random matrix in any weight format: the bytes a checkpoint would hold, and a view on them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moechat import _native
from moechat.errors import Usage

_GROUP = 32  # columns of a scale of int4 and mxfp4
_GROUPS = {"int4": _GROUP, "mxfp4": _GROUP}
# GGUF blocks: columns, bytes, and where the high byte of a float16 scale stands with its value. A
# high byte h is a scale of about 2^(h / 4 - 15); these make weights of about 1/32.
_BLOCKS: dict[str, tuple[int, int, dict[int, int]]] = {
    "q8_0": (32, 34, {1: 0x10}),
    "q4_0": (32, 18, {1: 0x20}),
    "q5_0": (32, 22, {1: 0x1C}),
    "q4_k": (256, 144, {1: 0x10, 3: 0x10}),
    "q5_k": (256, 176, {1: 0x0C, 3: 0x0C}),
    "q6_k": (256, 210, {209: 0x08}),
    "mxfp4_block": (32, 17, {0: 121}),  # E8M0: 2^(121 - 127)
}
_RMS = {"fp8": 127.0, "int4": 4.6}  # of random codes


@dataclass(frozen=True)
class StoredMatrix:
    """Arrays as a checkpoint stores them, all 2-D; ``options`` are MatrixView's."""

    format: str
    data: NDArray[Any]
    scale: NDArray[Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def parts(self) -> list[tuple[str, NDArray[Any]]]:
        """The arrays that there are, by field name."""
        named = (("data", self.data), ("scale", self.scale))
        return [(name, array) for name, array in named if array is not None]

    @property
    def num_bytes(self) -> int:
        """Weights and scales."""
        return sum(array.nbytes for _, array in self.parts)

    def view(self, arrays: Mapping[str, Any]) -> _native.MatrixView:
        """A native view of other arrays of the same types and shapes, by field name."""
        return _native.MatrixView(self.format, **arrays, **self.options)


def random_matrix(
    format: str, outputs: int, inputs: int, generator: np.random.Generator
) -> StoredMatrix:
    """Random codes without NaN, with scales that make products of about the input's size.

    Raises Usage for a shape that the format cannot hold.
    """
    columns = _BLOCKS[format][0] if format in _BLOCKS else _GROUPS.get(format, 1)
    if inputs % columns:
        raise Usage(
            f"{format} cannot hold a matrix of {outputs} x {inputs}",
            f"it stores inputs in groups of {columns}",
        )
    if format in _BLOCKS:
        return StoredMatrix(format, _blocks(format, outputs, inputs, generator))
    if format == "bf16":
        values = generator.standard_normal((outputs, inputs), np.float32)
        return StoredMatrix(format, _bf16(values * np.float32(1 / math.sqrt(inputs))))
    if format == "fp8":
        data = generator.integers(0, 256, (outputs, inputs), np.uint8)
        data[data & 0x7F == 0x7F] = 0x7E  # the two NaN codes
        grid = (-(-outputs // 128), -(-inputs // 128))
        scale = _scales(format, inputs, grid, generator)
        return StoredMatrix(format, data, scale, {"block": (128, 128)})
    data = generator.integers(0, 256, (outputs, inputs // 2), np.uint8)
    grid = (outputs, inputs // _GROUP)
    if format == "mxfp4":
        exponents = generator.integers(117, 121, grid, np.uint8)
        return StoredMatrix(format, data, exponents, {"block": (1, _GROUP)})
    scales = _bf16(_scales(format, inputs, grid, generator))
    options = {"block": (1, _GROUP), "scale_type": "bf16", "cols": inputs}
    return StoredMatrix(format, data.view(np.int32), scales, options)


def _blocks(
    format: str, outputs: int, inputs: int, generator: np.random.Generator
) -> NDArray[np.uint8]:
    columns, size, scales = _BLOCKS[format]
    data = generator.integers(0, 256, (outputs, inputs // columns, size), np.uint8)
    for offset, high_byte in scales.items():
        data[..., offset] = high_byte
    return data.reshape(outputs, -1)


def _scales(
    format: str, inputs: int, shape: tuple[int, int], generator: np.random.Generator
) -> NDArray[np.float32]:
    usual = 1 / (_RMS[format] * math.sqrt(inputs))
    return (generator.uniform(0.5, 1.5, shape) * usual).astype(np.float32)


def _bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Their upper halves: close enough, since any finite weights will do."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)
