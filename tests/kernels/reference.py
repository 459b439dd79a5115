"""Random weights of every format as the kernels see them, and their products in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from formats import (
    BLOCKS,
    E2M1_VALUES,
    FP8_VALUES,
    NAN_CODES,
    awq_codes,
    bf16_bits,
    bf16_values,
    decode_blocks,
    f16_values,
    gptq_codes,
    nibbles,
    scale_values,
)
from shapes import Shape

from moechat import _native


@dataclass(frozen=True)
class Variant:
    """A format, and how its scales and columns stand; ``block`` None takes the shape's."""

    format: str
    scale_type: str | None = None
    block: tuple[int, int] | None = None
    transposed: bool = False
    col_step: int = 1
    indexed: bool = False  # gptq's group_index

    def __str__(self) -> str:
        block = "x".join(map(str, self.block or ()))
        flags = [self.scale_type, block, "step2" * (self.col_step == 2), "indexed" * self.indexed]
        return "-".join([self.format, *filter(None, flags)])


F32, BF16, FP8 = Variant("f32"), Variant("bf16"), Variant("fp8", "f32")
ONE_A_ROW = (1, 2**20)
VARIANTS = [
    F32, Variant("f16"), BF16, FP8, Variant("fp8", "bf16"), Variant("fp8", "f16", ONE_A_ROW),
    Variant("fp8", "e8m0", (1, 32)),
    Variant("mxfp4", "e8m0", (1, 32)), Variant("int4", "bf16", (1, 32)),
    Variant("int4", "f16", (1, 64)), Variant("int4", "f32", (1, 128)),
    Variant("int4", "bf16", (1, 96)), Variant("int4", "bf16", ONE_A_ROW),
    *map(Variant, BLOCKS),
    Variant("awq", "f16", (32, 1), transposed=True),
    Variant("gptq", "f16", (128, 1), transposed=True),
    Variant("gptq", "f16", (16, 1), transposed=True, indexed=True),
    *(Variant(name, transposed=True, col_step=2) for name in ("f32", "f16", "bf16")),
]  # fmt: skip
DTYPES = {"f32": np.float32, "f16": np.uint16, "bf16": np.uint16, "e8m0": np.uint8}


@dataclass(frozen=True)
class Weight:
    """A matrix as the kernels see it, with its stored values in float64 [rows, cols]."""

    shape: Shape
    variant: Variant
    data: np.ndarray
    scale: np.ndarray | None
    zeros: np.ndarray | None
    group_index: np.ndarray | None
    values: np.ndarray
    view: _native.MatrixView

    def run(self, kernel: str, x: np.ndarray, compute: str, *args: object) -> np.ndarray:
        """``kernel`` of matmul.h on the stored matrix, whichever its orientation as a weight."""
        if self.variant.transposed and kernel != "gemv_transposed":
            kernel = "multiply_transposed"
        return getattr(_native, kernel)(self.view, x, compute, *args)


def units(variant: Variant) -> tuple[int, int]:
    """Columns and rows that a view can be cut at multiples of."""
    if variant.format in BLOCKS:
        return BLOCKS[variant.format][0], 1
    columns = {"mxfp4": 2, "int4": 8, "awq": 8, "gptq": 8}.get(variant.format, 1)
    return columns, 8 if variant.format == "gptq" else 1


def fit(shape: Shape, variant: Variant) -> Shape:
    """The shape with its columns and origins rounded up to what the format can have."""
    unit, row_unit = units(variant)

    def up(n: int, unit: int) -> int:
        return -(-n // unit) * unit

    return replace(
        shape,
        rows=up(shape.rows, row_unit),
        cols=shape.cols if variant.format in ("int4", "gptq") else up(shape.cols, unit),
        col_origin=0 if variant.format in BLOCKS else up(shape.col_origin, unit),
        block=variant.block or shape.block,
    )


def place(content: np.ndarray, shape: Shape, col_step: int = 1) -> np.ndarray:
    """The content with the gaps and the offset that the shape asks for; gaps hold 0xFF bytes.

    Nothing stands behind the last element.
    """
    rows, items = content.shape
    step = content.itemsize * col_step
    pitch = items * step + shape.gap * content.itemsize
    end = shape.offset_bytes + (rows - 1) * pitch + (items - 1) * step + content.itemsize
    room = np.full(end, 0xFF, np.uint8)
    placed = np.ndarray(content.shape, content.dtype, room, shape.offset_bytes, (pitch, step))
    placed[:] = content
    return placed


def make_weight(
    shape: Shape,
    variant: Variant,
    content: np.ndarray,
    scale: np.ndarray | None = None,
    zeros: np.ndarray | None = None,
    group_index: np.ndarray | None = None,
) -> Weight:
    """A Weight of stored items; ``shape`` is one that fits. Grid scales are 1 unless given."""
    data = place(content, shape, variant.col_step)
    row_group = (np.arange(shape.rows) + shape.row_origin) // shape.block[0]
    col_group = (np.arange(shape.cols) + shape.col_origin) // shape.block[1]
    if group_index is not None:
        row_group = group_index
    if variant.scale_type is not None and scale is None:
        one = {"f32": 1.0, "bf16": 0x3F80, "f16": 0x3C00, "e8m0": 127}[variant.scale_type]
        grid = (row_group.max() + 1, col_group[-1] + 1)
        scale = np.full(grid, one, DTYPES[variant.scale_type])
    if variant.format in BLOCKS:
        values = decode_blocks(variant.format, content)
    elif variant.format == "f32":
        values = content.astype(np.float64)
    elif variant.format == "bf16":
        values = bf16_values(content).astype(np.float64)
    elif variant.format == "f16":
        values = f16_values(content)
    else:
        if variant.format == "fp8":
            codes = FP8_VALUES[content]
        elif variant.format == "mxfp4":
            codes = E2M1_VALUES[nibbles(content)]
        elif variant.format == "int4":
            codes = nibbles(content)[:, : shape.cols] - 8
        else:
            unpack = awq_codes if variant.format == "awq" else gptq_codes
            zero = awq_codes(zeros) if variant.format == "awq" else nibbles(zeros) + 1
            columns = np.arange(shape.cols) + shape.col_origin
            codes = unpack(content) - zero[np.ix_(row_group, columns)]
        values = codes * scale_values(scale, variant.scale_type)[np.ix_(row_group, col_group)]
    view = _native.MatrixView(
        variant.format,
        data,
        scale,
        shape.block,
        shape.row_origin,
        shape.col_origin,
        cols=shape.cols,
        scale_type=variant.scale_type,
        zeros=zeros,
        group_index=group_index,
        transposed=variant.transposed,
        col_step=variant.col_step,
    )
    return Weight(shape, variant, data, scale, zeros, group_index, values, view)


def random_scales(
    generator: np.random.Generator, size: tuple[int, ...], scale_type: str, kind: str
) -> np.ndarray:
    """Stored scales; ``kind`` subnormal: below the type's normal range where that is above 1e-9."""
    if scale_type == "e8m0":
        return generator.integers(112, 120, size).astype(np.uint8)
    if scale_type == "f16" and kind == "subnormal":
        return generator.integers(1, 1024, size).astype(np.uint16)
    values = np.exp(generator.uniform(-9, -5, size)).astype(np.float32)
    if kind == "heavy":
        values *= generator.standard_t(1.5, size).astype(np.float32)
    if scale_type == "f16":
        return values.astype(np.float16).view(np.uint16)
    return bf16_bits(values) if scale_type == "bf16" else values


def _random_blocks(generator: np.random.Generator, shape: Shape, format: str, kind: str):
    cols, size = BLOCKS[format]
    blocks = generator.integers(0, 256, (shape.rows, shape.cols // cols, size)).astype(np.uint8)
    if format == "mxfp4_block":
        blocks[..., :1] = random_scales(generator, (*blocks.shape[:2], 1), "e8m0", kind)
    else:
        begin = 208 if format == "q6_k" else 0
        count = 2 if format in ("q4_k", "q5_k") else 1
        halves = random_scales(generator, (*blocks.shape[:2], count), "f16", kind)
        blocks[..., begin : begin + 2 * count] = halves.view(np.uint8)
    return blocks.reshape(shape.rows, -1)


def random_weight(shape: Shape, variant: Variant, seed: int, kind: str = "normal") -> Weight:
    """``kind``: normal, heavy (long tails), spike (one huge value), subnormal (codes or scales)."""
    generator = np.random.default_rng(seed)
    shape = fit(shape, variant)
    size = (shape.rows, shape.cols)
    if variant.format in BLOCKS:
        return make_weight(shape, variant, _random_blocks(generator, shape, variant.format, kind))
    if variant.scale_type is None:
        values = activations(size, kind, seed + 1) * np.float32(0.05)
        if variant.format == "f16":
            values = np.clip(values, -6e4, 6e4).astype(np.float16).view(np.uint16)
        return make_weight(
            shape, variant, bf16_bits(values) if variant.format == "bf16" else values
        )
    grid = (
        (shape.row_origin + shape.rows - 1) // shape.block[0] + 1,
        (shape.col_origin + shape.cols - 1) // shape.block[1] + 1,
    )
    scale = random_scales(generator, grid, variant.scale_type, kind)
    if variant.format == "fp8":
        codes = generator.integers(0, 127, size) | generator.integers(0, 2, size) << 7
        if kind == "normal":  # magnitudes within a factor of 64, as in a checkpoint
            codes = generator.integers(0x20, 0x50, size) | generator.integers(0, 2, size) << 7
        elif kind == "subnormal":
            codes = generator.integers(0, 8, size) | generator.integers(0, 2, size) << 7
        elif kind == "spike":
            codes[:] = 0x08
            codes[shape.rows // 2, shape.cols // 2] = 0xFE
        return make_weight(shape, variant, codes.astype(np.uint8), scale)

    def words(*size: int) -> np.ndarray:
        return generator.integers(-(2**31), 2**31, size).astype(np.int32)

    if variant.format == "mxfp4":
        data = words(shape.rows, shape.cols).view(np.uint8)[:, : shape.cols // 2]
        return make_weight(shape, variant, data, scale)
    if variant.format == "int4":
        return make_weight(shape, variant, words(shape.rows, -(-shape.cols // 8)), scale)
    data = words(shape.rows, shape.cols // 8)
    if variant.format == "gptq":
        data = words(shape.rows // 8, shape.cols)
    index = None
    if variant.indexed:
        index = generator.integers(0, grid[0], shape.rows, np.int32)
        index[1] = grid[0] - 1
    return make_weight(shape, variant, data, scale, words(grid[0], -(-grid[1] // 8)), index)


def _first_halves(variant: Variant) -> slice:
    """Where a GGUF block's first scale stands."""
    if variant.format == "mxfp4_block":
        return slice(0, 1)
    return slice(208, 210) if variant.format == "q6_k" else slice(0, 2)


def with_scales(shape: Shape, variant: Variant, choices: dict[str, np.ndarray]) -> Weight:
    """A random weight whose scales are drawn from ``choices``, by scale type."""
    weight = random_weight(shape, variant, 31)
    generator = np.random.default_rng(32)
    if variant.format in BLOCKS:
        scale_type = "e8m0" if variant.format == "mxfp4_block" else "f16"
        size = BLOCKS[variant.format][1]
        content = weight.data.reshape(weight.shape.rows, -1, size).copy()
        scale = generator.choice(choices[scale_type], (*content.shape[:2], 1))
        content[..., _first_halves(variant)] = scale.view(np.uint8)
        return make_weight(weight.shape, variant, content.reshape(weight.shape.rows, -1))
    if variant.scale_type is None:
        return weight
    scale = generator.choice(choices[variant.scale_type], weight.scale.shape)
    return _with(weight, weight.data, scale)


def with_nan(weight: Weight) -> Weight:
    """The weight with one NaN: in a code where the format has one, else in a scale."""
    variant, data, scale = weight.variant, np.array(weight.data), weight.scale
    row, col = len(data) - 1, data.shape[1] * 3 // 4
    if variant.scale_type is None and variant.format not in BLOCKS:
        data[row, col] = {"f32": np.nan, "bf16": 0x7FC1, "f16": 0x7E01}[variant.format]
    elif variant.format == "fp8":
        data[row, col] = NAN_CODES[1]
    elif variant.format in BLOCKS:
        size = BLOCKS[variant.format][1]
        blocks = data.reshape(len(data), -1, size)
        nan = [0xFF] if variant.format == "mxfp4_block" else [0x01, 0x7E]
        blocks[row, -1, _first_halves(variant)] = nan
    else:
        scale = scale.copy()
        nan = {"f32": np.nan, "bf16": 0x7FC1, "f16": 0x7E01, "e8m0": 255}[variant.scale_type]
        scale[-1, -1] = nan
    return _with(weight, data, scale)


def _with(weight: Weight, data: np.ndarray, scale: np.ndarray | None) -> Weight:
    return make_weight(weight.shape, weight.variant, data, scale, weight.zeros, weight.group_index)


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


FIXED_COLUMNS = 256


def takes_fixed_point(weight: Weight, kernel: str, num_rows: int) -> bool:
    """Whether bf16 products of the forced instruction set take x in fixed point (matmul.h)."""
    block, shape = weight.shape.block[1], weight.shape
    if _native.active_instruction_set() not in ("avx512bf16", "amx"):
        return False
    if kernel == "gemv_transposed" or num_rows > 16 or weight.variant.transposed:
        return False
    if weight.variant.format in ("int4", "mxfp4"):
        starts = shape.col_origin % block == 0
        return starts and (block in (32, 64) or block % 128 == 0 or block >= shape.cols)
    return weight.variant.format in ("q4_0", "mxfp4_block", "q4_k", "q5_k", "q6_k")


def fixed_point(x: np.ndarray) -> np.ndarray:
    """BF16 values [rows, columns] in units of 2^(e - 14), e the exponent of the largest of 256."""
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % FIXED_COLUMNS)))
    blocks = padded.reshape(len(x), -1, FIXED_COLUMNS).astype(np.float64)
    largest = np.abs(blocks).max(-1, keepdims=True)
    unit = np.exp2(np.maximum(np.frexp(largest)[1] - 1.0, 16 - 127) - 14)
    return (np.rint(blocks / unit) * unit).reshape(padded.shape)[:, : x.shape[1]]


def rounded_inputs(x: np.ndarray, compute: str, fixed: bool = False) -> np.ndarray:
    """x as the kernel multiplies it, float64."""
    rounded = (bf16_values(bf16_bits(x)) if compute == "bf16" else x).astype(np.float64)
    return fixed_point(rounded) if fixed and compute == "bf16" else rounded


def product(
    weight: Weight, x: np.ndarray, compute: str, transposed: bool = False, fixed: bool = False
):
    """The float64 product, and sum |x| |w| of each of its elements."""
    inputs = rounded_inputs(x, compute, fixed)
    matrix = weight.values if transposed else weight.values.T
    return inputs @ matrix, np.abs(inputs) @ np.abs(matrix)
