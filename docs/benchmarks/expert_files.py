"""Random experts of DeepSeek-V3's shape in one file, for programs that shall read the same bytes.

numpy alone: both sides import it. Expert after expert, its gate, up [2048, 7168] and down
[7168, 2048], each its codes and then its scales; every part begins at a multiple of 64 bytes.
Formats: fp8 (e4m3, float32 scales of 128x128), int4 (nibbles of value + 8, low first; BF16 scales
of 32), mxfp4 (e2m1 nibbles, low first; E8M0 scales of 32), bf16.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HIDDEN, INNER, EXPERTS_PER_TOKEN = 7168, 2048, 8
MATRICES = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
FORMATS = ("fp8", "int4", "mxfp4", "bf16")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
Array = NDArray[Any]


def part_shapes(format_: str, rows: int, cols: int) -> list[tuple[tuple[int, int], np.dtype[Any]]]:
    """Shape and type of a matrix's codes and, if there are any, scales."""
    if format_ == "bf16":
        return [((rows, cols), np.dtype(np.uint16))]
    if format_ == "fp8":
        return [
            ((rows, cols), np.dtype(np.uint8)),
            ((rows // 128, cols // 128), np.dtype(np.float32)),
        ]
    scale = np.dtype(np.uint16 if format_ == "int4" else np.uint8)
    return [((rows, cols // 2), np.dtype(np.uint8)), ((rows, cols // 32), scale)]


def expert_bytes(format_: str) -> int:
    """Bytes of one expert's codes and scales; all are multiples of 64."""
    return sum(
        shape[0] * shape[1] * dtype.itemsize
        for rows, cols in MATRICES.values()
        for shape, dtype in part_shapes(format_, rows, cols)
    )


def write(path: Path, format_: str, experts: int, seed: int = 4) -> None:
    """The file, there only when complete; values are finite, about as large as trained ones."""
    generator = np.random.Generator(np.random.SFC64(seed))
    partial = path.with_suffix(".part")
    try:
        with partial.open("wb") as file:
            for _ in range(experts):
                for rows, cols in MATRICES.values():
                    for index, (shape, dtype) in enumerate(part_shapes(format_, rows, cols)):
                        make = _random_scales if index else _random_codes
                        file.write(make(format_, shape, dtype, generator).tobytes())
            os.fsync(file.fileno())  # the disk must be idle while others are measured
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _random_codes(
    format_: str, shape: tuple[int, int], dtype: np.dtype[Any], generator: np.random.Generator
) -> Array:
    codes = generator.integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)
    if format_ == "fp8":
        codes &= 0xBF  # below 2: neither NaN nor values that drown the others
    elif format_ == "bf16":
        codes = codes & 0x81FF | 0x3A00  # 2^-11 to 2^-7
    return codes


def _random_scales(
    format_: str, shape: tuple[int, int], dtype: np.dtype[Any], generator: np.random.Generator
) -> Array:
    exponents = generator.integers(-9, -7, shape, endpoint=True)
    if format_ == "fp8":
        return np.asarray(np.exp2(exponents + 2.0), dtype)
    if format_ == "int4":
        return ((exponents + 127) << 7 | generator.integers(0, 128, shape)).astype(dtype)
    return (exponents + 127).astype(dtype)


def open_file(path: Path, format_: str, experts: int) -> list[dict[str, list[Array]]]:
    """Of each expert codes and scales by matrix, as views of a read-only mapping."""
    data = np.memmap(path, np.uint8, "r")
    offset, result = 0, []
    for _ in range(experts):
        matrices: dict[str, list[Array]] = {}
        for name, (rows, cols) in MATRICES.items():
            matrices[name] = []
            for shape, dtype in part_shapes(format_, rows, cols):
                size = shape[0] * shape[1] * dtype.itemsize
                matrices[name].append(data[offset : offset + size].view(dtype).reshape(shape))
                offset += size
        result.append(matrices)
    return result


def bf16_values(bits: Array) -> NDArray[np.float32]:
    """BF16 bits as float32."""
    values: NDArray[np.float32] = (bits.astype(np.uint32) << 16).view(np.float32)
    return values


def decode(format_: str, parts: list[Array]) -> NDArray[np.float32]:
    """A matrix as float32 [rows, cols]; every value is exact."""
    if format_ == "bf16":
        return bf16_values(parts[0])
    codes, scales = parts
    if format_ == "fp8":
        every = np.arange(256)
        exponent, mantissa = every >> 3 & 15, every & 7
        size = np.where(
            exponent > 0, (8 + mantissa) * np.exp2(exponent - 10.0), mantissa * np.exp2(-9.0)
        )
        table = np.where(every < 128, size, -size).astype(np.float32)
        values, factors = table[codes], np.repeat(np.repeat(scales, 128, axis=0), 128, axis=1)
    else:
        nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
        if format_ == "int4":
            values, narrow = nibbles.astype(np.float32) - 8, bf16_values(scales)
        else:
            values = np.concatenate([E2M1, -E2M1])[nibbles]
            narrow = np.exp2(scales.astype(np.float32) - 127)
        factors = np.repeat(narrow, 32, axis=1)
    return np.asarray(values * factors, np.float32)


def reference(
    format_: str,
    experts: list[dict[str, list[Array]]],
    x: NDArray[np.float64],
    ids: NDArray[np.int32],
    weights: NDArray[np.float32],
) -> NDArray[np.float64]:
    """sum of weight * down(silu(gate x) * up x) in float64; x [tokens, 7168], ids [tokens, 8]."""
    y = np.zeros_like(x)
    for expert in np.unique(ids):
        gate, up, down = (
            decode(format_, experts[expert][name]).astype(np.float64) for name in MATRICES
        )
        for token, slot in np.argwhere(ids == expert):
            pre = gate @ x[token]
            inner = pre / (1 + np.exp(-pre)) * (up @ x[token])
            y[token] += float(weights[token, slot]) * (down @ inner)
    return y
