"""DeepSeek's FP8: e4m3 codes, one float32 scale for a block of 128 x 128, multiplied."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moechat.quantize.float_codes import E4M3_MAX, e4m3_to_f32, f32_to_e4m3

BLOCK = 128


class Fp8Rows(NamedTuple):
    """Encoded rows, and the squares that tell what it cost.

    ``codes`` uint8 [rows, cols]; ``scale`` float32 [ceil(rows / 128), ceil(cols / 128)].
    """

    codes: NDArray[np.uint8]
    scale: NDArray[np.float32]
    squared_error: float
    squared_sum: float


def encode_fp8(values_rc: NDArray[np.float32]) -> Fp8Rows:
    """Quantise finite float32 [rows, cols], the first row being the first of a block.

    The largest magnitude of a block becomes 448; blocks at the lower and right edge may be smaller.
    """
    rows, cols = values_rc.shape
    codes_rc = np.empty((rows, cols), np.uint8)
    scale = np.empty((-(-rows // BLOCK), -(-cols // BLOCK)), np.float32)
    starts = np.arange(0, cols, BLOCK)
    squared_error = squared_sum = 0.0
    for index, first in enumerate(range(0, rows, BLOCK)):
        block_rc = values_rc[first : first + BLOCK]
        largest = np.maximum(block_rc.max(axis=0), -block_rc.min(axis=0))
        block_scale = np.maximum.reduceat(largest, starts) / np.float32(E4M3_MAX)
        # Zeros, and what float32 could not divide by: the values become zeros in both cases.
        block_scale[block_scale < np.finfo(np.float32).tiny] = 1
        scale[index] = block_scale
        scale_c = np.repeat(block_scale, BLOCK)[:cols]
        codes = f32_to_e4m3(block_rc / scale_c)
        codes_rc[first : first + BLOCK] = codes
        decoded = e4m3_to_f32(codes)
        decoded *= scale_c
        decoded -= block_rc
        squared_error += squares(decoded)
        squared_sum += squares(block_rc)
    return Fp8Rows(codes_rc, scale, squared_error, squared_sum)


def squares(values: NDArray[np.float32]) -> float:
    """The sum of squares, in float64."""
    return float(np.sum(np.square(values), dtype=np.float64))
