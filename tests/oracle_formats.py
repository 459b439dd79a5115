"""Number formats and safetensors files for the models that tests make: numpy only.

Of types that numpy lacks, arrays hold the raw bits: uint16 for BF16, uint8 for FP8.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

FP8_MAX = 448.0
FP8_BLOCK = 128
MXFP4_GROUP = 32
_E2M1_MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


class Stored(NamedTuple):
    """A tensor as a file has it: safetensors' name of its type, and its elements."""

    dtype: str
    array: np.ndarray


def to_bf16(values: np.ndarray) -> np.ndarray:
    """uint16 bits of finite float32 values, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_e4m3(values: np.ndarray) -> np.ndarray:
    """uint8 codes of float32 values in [-448, 448], rounded to nearest, ties to even.

    A code is sign, 4 bits of exponent (bias 7), 3 of mantissa; below 2^-6 steps stay 2^-9
    (OCP 8-bit floating point specification 1.0, section 5).
    """
    magnitude = np.abs(values.astype(np.float32))
    exponent = np.where(magnitude > 0, np.frexp(magnitude)[1] - 1, -6)
    exponent = np.maximum(exponent, -6)
    eighths = np.rint(np.ldexp(magnitude, 3 - exponent)).astype(np.int32)
    # Rounding up to 16 eighths is the next exponent's first code: the sum carries by itself.
    return (8 * (exponent + 6) + eighths + 128 * np.signbit(values)).astype(np.uint8)


def from_e4m3(codes: np.ndarray) -> np.ndarray:
    """float32 of finite e4m3 codes."""
    exponent, mantissa = (codes >> 3 & 15).astype(np.int32), (codes & 7).astype(np.float32)
    magnitude = np.ldexp(
        np.where(exponent > 0, 8 + mantissa, mantissa), np.maximum(exponent, 1) - 10
    )
    return np.where(codes & 128, -magnitude, magnitude).astype(np.float32)


def spread(grid: np.ndarray, rows: int, cols: int, block: tuple[int, int]) -> np.ndarray:
    """Each value of a grid [block rows, block cols] repeated over its block: [rows, cols]."""
    return grid.repeat(block[0], 0)[:rows].repeat(block[1], 1)[:, :cols]


def quantise_fp8_blocks(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """e4m3 codes [rows, cols] and float32 scales, one for each 128x128 block (the last ragged).

    A block's scale brings its largest magnitude to 448.
    """
    rows, cols = weight.shape
    starts = [np.arange(0, size, FP8_BLOCK) for size in (rows, cols)]
    largest = np.maximum.reduceat(np.maximum.reduceat(np.abs(weight), starts[0]), starts[1], 1)
    scale = (largest.astype(np.float64) / FP8_MAX).astype(np.float32)
    scaled = weight / spread(scale, rows, cols, (FP8_BLOCK, FP8_BLOCK))
    return to_e4m3(np.clip(scaled, -FP8_MAX, FP8_MAX)), scale


def quantise_mxfp4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Nibbles uint8 [..., cols/32, 16], low nibble first, and E8M0 scales uint8 [..., cols/32].

    The scale's exponent is that of the group's largest magnitude, less 2; a tie takes the smaller
    code (OCP Microscaling specification 1.0; 6 is the largest magnitude).
    """
    groups = weight.reshape(*weight.shape[:-1], -1, MXFP4_GROUP)
    exponent = np.frexp(np.abs(groups).max(-1))[1] - 3
    scaled = np.ldexp(groups, -exponent[..., None])
    codes = np.searchsorted(_E2M1_MIDPOINTS, np.abs(scaled)) + 8 * (scaled < 0)
    codes = codes.astype(np.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponent + 127).astype(np.uint8)


def dequantise_mxfp4(nibbles: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float32 [..., cols] of nibbles [..., cols/32, 16] and scales [..., cols/32]."""
    codes = np.stack([nibbles & 15, nibbles >> 4], -1).reshape(*nibbles.shape[:-1], MXFP4_GROUP)
    magnitude = np.ldexp(_E2M1[codes & 7], scales[..., None].astype(np.int32) - 127)
    values = np.where(codes & 8, -magnitude, magnitude).astype(np.float32)
    return values.reshape(*values.shape[:-2], -1)


def write_safetensors(path: Path, tensors: dict[str, Stored]) -> None:
    """A file in the very layout of the safetensors library: wide types first, then by name."""
    order = sorted(tensors, key=lambda name: (-tensors[name].array.dtype.itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        dtype, array = tensors[name]
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(np.ascontiguousarray(tensors[name].array).tobytes())
