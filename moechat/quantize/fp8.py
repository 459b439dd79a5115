"""DeepSeek's FP8: e4m3 codes, one float32 scale for a block of 128 x 128, multiplied."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moechat.quantize.float_codes import E4M3_MAX, e4m3_to_f32, f32_to_e4m3

BLOCK = 128
_PIECE = 1 << 14
_TILE = 8 * BLOCK  # columns that are worked on at once: 128 rows of them stay in the cache


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
    squared_error = squared_sum = 0.0
    for first_row in range(0, rows, BLOCK):
        for first_col in range(0, cols, _TILE):
            tile = np.s_[first_row : first_row + BLOCK, first_col : first_col + _TILE]
            tile_rc = values_rc[tile]
            scale_b = _block_scales(tile_rc)
            first_block = first_col // BLOCK
            scale[first_row // BLOCK, first_block : first_block + len(scale_b)] = scale_b
            scale_c = np.repeat(scale_b, BLOCK)[: tile_rc.shape[1]]
            codes = f32_to_e4m3(tile_rc / scale_c)
            codes_rc[tile] = codes
            decoded = e4m3_to_f32(codes)
            decoded *= scale_c
            decoded -= tile_rc
            squared_error += squares(decoded)
            squared_sum += squares(tile_rc)
    return Fp8Rows(codes_rc, scale, squared_error, squared_sum)


def _block_scales(tile_rc: NDArray[np.float32]) -> NDArray[np.float32]:
    """One scale for each 128 columns of a tile, the last of them perhaps for fewer."""
    largest = np.maximum(tile_rc.max(axis=0), -tile_rc.min(axis=0))
    scale_b = np.maximum.reduceat(largest, np.arange(0, len(largest), BLOCK))
    scale_b /= np.float32(E4M3_MAX)
    # Zeros, and what float32 cannot divide by: all values become zeros then.
    scale_b[scale_b < np.finfo(np.float32).tiny] = 1
    return scale_b


def squares(values: NDArray[np.float32]) -> float:
    """The sum of squares, in float64 and piece by piece: a large copy would cost page faults."""
    flat = values.reshape(-1)
    scratch = np.empty(min(_PIECE, flat.size), np.float64)
    total = 0.0
    for begin in range(0, flat.size, _PIECE):
        piece = flat[begin : begin + _PIECE]
        square = scratch[: len(piece)]
        np.copyto(square, piece)
        np.square(square, out=square)
        total += float(np.add.reduce(square))
    return total
