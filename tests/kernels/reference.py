"""The plain float64 definition of formats and products, written without the kernels' code."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from shapes import Shape

from moechat import _native

FORMATS = ("f32", "bf16", "fp8_block")
NAN_CODES = (0x7F, 0xFF)


def _fp8_value(code: int) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


FP8_VALUES = np.array([_fp8_value(code) for code in range(256)])


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """uint16 bits of float32 x rounded to the nearest BF16, ties to even; x must be finite."""
    low = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    down, rest = low >> 16, low & 0xFFFF
    up = (rest > 0x8000) | ((rest == 0x8000) & (down & 1 == 1))
    return (down + up).astype(np.uint16)


def bf16_values(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class Weight:
    """A matrix as the kernels see it, with its values in float64 [rows, cols]."""

    shape: Shape
    format: str
    data: np.ndarray
    scale: np.ndarray | None
    values: np.ndarray
    view: _native.MatrixView


def place(content: np.ndarray, shape: Shape) -> np.ndarray:
    """The content with the gaps and the offset that the shape asks for; gaps hold 0xFF bytes."""
    pitch = (shape.cols + shape.gap) * content.itemsize
    room = np.full(shape.offset_bytes + shape.rows * pitch, 0xFF, np.uint8)
    placed = np.ndarray(
        content.shape, content.dtype, room, shape.offset_bytes, (pitch, content.itemsize)
    )
    placed[:] = content
    return placed


def make_weight(shape: Shape, format: str, content: np.ndarray, scale: np.ndarray | None = None):
    """A Weight of float32 values, BF16 bits or FP8 codes [rows, cols]."""
    data = place(content, shape)
    if format == "fp8_block":
        row_block = (np.arange(shape.rows) + shape.row_origin) // shape.block[0]
        col_block = (np.arange(shape.cols) + shape.col_origin) // shape.block[1]
        if scale is None:
            scale = np.ones((row_block[-1] + 1, col_block[-1] + 1), np.float32)
        values = FP8_VALUES[content] * scale.astype(np.float64)[np.ix_(row_block, col_block)]
    elif format == "bf16":
        values = bf16_values(content).astype(np.float64)
    else:
        values = content.astype(np.float64)
    view = _native.MatrixView(format, data, scale, shape.block, shape.row_origin, shape.col_origin)
    return Weight(shape, format, data, scale, values, view)


def random_weight(shape: Shape, format: str, seed: int, kind: str = "normal") -> Weight:
    """``kind``: normal, heavy (long tails), spike (one huge value), subnormal (FP8 codes 0..7)."""
    generator = np.random.default_rng(seed)
    size = (shape.rows, shape.cols)
    if format == "fp8_block":
        codes = generator.integers(0, 127, size) | generator.integers(0, 2, size) << 7
        if kind == "normal":  # magnitudes within a factor of 64, as in a checkpoint
            codes = generator.integers(0x20, 0x50, size) | generator.integers(0, 2, size) << 7
        elif kind == "subnormal":
            codes = generator.integers(0, 8, size) | generator.integers(0, 2, size) << 7
        elif kind == "spike":
            codes[:] = 0x08
            codes[shape.rows // 2, shape.cols // 2] = 0xFE
        grid = (
            (shape.row_origin + shape.rows - 1) // shape.block[0] + 1,
            (shape.col_origin + shape.cols - 1) // shape.block[1] + 1,
        )
        scale = np.exp(generator.uniform(-9, -5, grid)).astype(np.float32)
        return make_weight(shape, format, codes.astype(np.uint8), scale)
    values = activations(size, kind, seed + 1) * np.float32(0.05)
    return make_weight(shape, format, values if format == "f32" else bf16_bits(values))


def activations(size: tuple[int, int], kind: str, seed: int) -> np.ndarray:
    """float32 [*size]: normal, small (1e-4), heavy (long tails), spike, zeros."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal(size)
    if kind == "small":
        x *= 1e-4
    elif kind == "heavy":
        x = generator.standard_t(1.5, size)
    elif kind == "spike":
        x[:, size[1] // 2] = 1e4
    elif kind == "zeros":
        x[generator.random(size) < 0.9] = 0
    return x.astype(np.float32)


def rounded_inputs(x: np.ndarray, compute: str) -> np.ndarray:
    """x as the kernel multiplies it, float64."""
    return (bf16_values(bf16_bits(x)) if compute == "bf16" else x).astype(np.float64)


def product(weight: Weight, x: np.ndarray, compute: str, transposed: bool = False):
    """The float64 product, and sum |x| |w| of each of its elements."""
    inputs = rounded_inputs(x, compute)
    matrix = weight.values if transposed else weight.values.T
    return inputs @ matrix, np.abs(inputs) @ np.abs(matrix)
