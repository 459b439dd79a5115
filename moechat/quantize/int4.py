"""compressed-tensors "pack-quantized" INT4: symmetric, one BF16 scale for 32 values of a row.

A value is (nibble - 8) * scale, eight nibbles an int32, lowest first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moechat.quantize.float_codes import bf16_to_f32, f32_to_bf16

GROUP = 32
_LOWEST, _HIGHEST = -8, 7
# How many steps the largest value of a group is tried at. More, or others, gain under 0.3 % of the
# error on trained and on random weights. Below 8.5, so that it cannot round to -9.
_CANDIDATE_STEPS = (7.0, 7.5, 8.0, 8.45)
# Groups that are worked on at once: three float32 arrays of them just fit a level 2 cache, and
# calls are long enough for other threads to get at the interpreter.
_PIECE_GROUPS = 4096
# A group with no larger value is zero: its scale would not be a normal BF16 number.
_TINY = 1e-30


class Int4Rows(NamedTuple):
    """Encoded rows, and the squares that tell what it cost.

    ``packed`` int32 [rows, cols / 8]; ``scale`` BF16 bits uint16 [rows, cols / 32].
    """

    packed: NDArray[np.int32]
    scale: NDArray[np.uint16]
    squared_error: float
    squared_sum: float


def encode_int4(values_rc: NDArray[np.float32]) -> Int4Rows:
    """Quantise finite float32 [rows, cols], cols a multiple of 32.

    Of a group w the value of largest magnitude goes to about -8, the longer side of the range; so a
    scale may be negative. Each candidate scale gives integers q, for which the least squared error
    is at the scale <w, q> / <q, q> and equals <w, w> - <w, q>^2 / <q, q>. The best one's scale is
    rounded to BF16, and w to multiples of that.
    """
    rows, cols = values_rc.shape
    groups_g32 = values_rc.reshape(-1, GROUP)
    num_groups = len(groups_g32)
    packed_g4 = np.empty((num_groups, GROUP // 8), np.uint32)
    scale_g = np.empty(num_groups, np.uint16)
    scratch = np.empty((3, GROUP, min(_PIECE_GROUPS, num_groups)), np.float32)
    squared_error = squared_sum = 0.0
    for begin in range(0, num_groups, _PIECE_GROUPS):
        piece = slice(begin, begin + _PIECE_GROUPS)
        error, total = _encode_piece(groups_g32[piece], packed_g4[piece], scale_g[piece], scratch)
        squared_error += error
        squared_sum += total
    packed_rc = packed_g4.reshape(rows, cols // 8).view(np.int32)
    return Int4Rows(packed_rc, scale_g.reshape(rows, cols // GROUP), squared_error, squared_sum)


def _encode_piece(
    groups_g32: NDArray[np.float32],
    packed_g4: NDArray[np.uint32],
    scale_g: NDArray[np.uint16],
    scratch: NDArray[np.float32],
) -> tuple[float, float]:
    """Fill ``packed_g4`` and ``scale_g``; returns the sums of squared errors and of squares.

    Groups lie along the last axis, so that sums over a group are sums of long rows: fast, and in
    the same order on every processor.
    """
    num_groups = len(groups_g32)
    unit, steps, product = (array[:, :num_groups] for array in scratch)
    np.copyto(unit, groups_g32.T)
    highest, lowest = unit.max(axis=0), unit.min(axis=0)
    extreme = np.where(highest > -lowest, highest, lowest)
    is_zero = np.abs(extreme) < np.float32(_TINY)
    extreme[is_zero] = -1
    # From here the extreme is -1, or the whole group tiny.
    np.multiply(unit, np.float32(-1) / extreme, out=unit)
    best_gain = np.full(num_groups, -1, np.float32)
    step = np.ones(num_groups, np.float32)
    for candidate in _CANDIDATE_STEPS:
        np.multiply(unit, np.float32(candidate), out=steps)
        np.rint(steps, out=steps)
        np.minimum(steps, np.float32(_HIGHEST), out=steps)
        np.multiply(unit, steps, out=product)
        along = np.add.reduce(product, axis=0)
        np.square(steps, out=product)
        length = np.maximum(np.add.reduce(product, axis=0), np.float32(1))
        fitted = along / length
        gain = along * fitted
        step = np.where(gain > best_gain, fitted, step)
        np.maximum(best_gain, gain, out=best_gain)
    step[is_zero] = 1
    scale = f32_to_bf16(-extreme * step)
    scale_g[:] = scale
    step = bf16_to_f32(scale) / -extreme
    np.multiply(unit, np.float32(1) / step, out=steps)
    np.rint(steps, out=steps)
    np.clip(steps, np.float32(_LOWEST), np.float32(_HIGHEST), out=steps)
    np.multiply(steps, step, out=product)
    np.subtract(product, unit, out=product)
    np.square(product, out=product)
    errors = np.add.reduce(product, axis=0)
    np.square(unit, out=unit)
    squares = np.add.reduce(unit, axis=0)
    _pack(steps, packed_g4, product.view(np.uint32))
    weights = np.square(extreme.astype(np.float64))
    return float(np.sum(errors * weights)), float(np.sum(squares * weights))


def _pack(
    steps: NDArray[np.float32], packed_g4: NDArray[np.uint32], codes: NDArray[np.uint32]
) -> None:
    """Nibbles of float32 [32, groups] in -8..7 into uint32 [groups, 4]; ``codes`` is scratch."""
    np.subtract(steps, np.float32(_LOWEST), out=steps)
    np.copyto(codes, steps, casting="unsafe")
    for word in range(GROUP // 8):
        rows = codes[8 * word : 8 * word + 8]
        for nibble in range(1, 8):
            np.left_shift(rows[nibble], np.uint32(4 * nibble), out=rows[nibble])
            np.bitwise_or(rows[0], rows[nibble], out=rows[0])
        packed_g4[:, word] = rows[0]
