"""Small floating-point types in numpy: BF16, FP8 e4m3 and E8M0, exactly rounded."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

E4M3_MAX = 448.0
_E4M3_MAX_CODE = 0x7E  # 0x7F is NaN; there is no infinity
_PIECE = 1 << 16  # elements that are worked on at once: their float32 stay in the level 2 cache


def bf16_to_f32(codes: NDArray[np.uint16]) -> NDArray[np.float32]:
    """BF16 bits as float32 of the same shape."""
    bits = codes.astype(np.uint32)
    np.left_shift(bits, 16, out=bits)
    return bits.view(np.float32)


def f32_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """float32 as BF16 bits, to nearest even; large finite values become infinite, NaN garbage."""
    bits = values.view(np.uint32)
    odd = np.right_shift(bits, 16)
    np.bitwise_and(odd, 1, out=odd)
    np.add(odd, 0x7FFF, out=odd)
    np.add(odd, bits, out=odd)
    np.right_shift(odd, 16, out=odd)
    return odd.astype(np.uint16)


def bf16_is_finite(codes: NDArray[np.uint16]) -> bool:
    """Whether no element of BF16 bits is infinite or NaN."""
    return not bool(((codes & 0x7F80) == 0x7F80).any())


def e4m3_has_nan(codes: NDArray[np.uint8]) -> bool:
    """Whether any code is one of the two NaN, 0x7F and 0xFF."""
    return bool(((codes & 0x7F) == 0x7F).any())


def e4m3_to_f32(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """FP8 e4m3 codes as float32 of the same shape; a NaN code becomes +-480: check before."""
    # Sign-extended and shifted, exponent and mantissa stand where float32 has them, and the
    # spare copies of the sign are masked out. 2^120 is the difference of the exponents' biases;
    # e4m3's subnormals are float32's on the way.
    bits = codes.view(np.int8).astype(np.int32)
    np.left_shift(bits, 20, out=bits)
    np.bitwise_and(bits, np.int32(0x87F00000 - (1 << 32)), out=bits)
    values = bits.view(np.float32)
    np.multiply(values, np.float32(2.0**120), out=values)
    return values


def f32_to_e4m3(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Finite float32 as FP8 e4m3 codes, to nearest even, saturated at +-448."""
    flat = np.ascontiguousarray(values).reshape(-1)
    codes = np.empty(flat.size, np.uint8)
    for begin in range(0, flat.size, _PIECE):
        codes[begin : begin + _PIECE] = _e4m3_piece(flat[begin : begin + _PIECE])
    return codes.reshape(values.shape)


def _e4m3_piece(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    bits: NDArray[Any] = values.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    # Normal: drop 20 of float32's 23 mantissa bits, rounding, and rebias the exponent by 120.
    codes = (magnitude >> np.uint32(20)) & np.uint32(1)
    codes += magnitude
    codes += np.uint32(0x7FFFF)
    codes -= np.uint32(120 << 23)  # wraps below the smallest normal; those are replaced next
    codes >>= np.uint32(20)
    # Subnormal: the last place of 2^14 is 2^-9, e4m3's smallest step.
    absolute = magnitude.view(np.float32)
    shifted = (absolute + np.float32(2.0**14)).view(np.uint32)
    shifted -= np.uint32(141 << 23)
    np.copyto(codes, shifted, where=absolute < np.float32(2.0**-6))
    np.minimum(codes, np.uint32(_E4M3_MAX_CODE), out=codes)
    codes |= (bits >> np.uint32(24)) & np.uint32(0x80)
    narrow: NDArray[np.uint8] = codes.astype(np.uint8)
    return narrow


def e8m0_to_f32(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """E8M0 exponents, 2^(code - 127), as float32; code 255 (NaN) becomes infinite: check before."""
    values: NDArray[np.float32] = np.ldexp(np.float32(1), codes.astype(np.int32) - 127)
    return values
