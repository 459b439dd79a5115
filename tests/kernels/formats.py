"""What stored bytes mean, in float64: written from each format's documentation, not the kernels.

OCP Microscaling Formats specification 1.0 (E2M1, E8M0); compressed-tensors "pack-quantized";
AutoAWQ's GEMM and AutoGPTQ's version 1 packing; ggml's block formats (GGUF).
"""

from __future__ import annotations

import numpy as np

NAN_CODES = (0x7F, 0xFF)
# Columns and bytes of a GGUF block.
BLOCKS = {
    "q8_0": (32, 34),
    "q4_0": (32, 18),
    "q5_0": (32, 22),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
    "mxfp4_block": (32, 17),
}
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E8M0_VALUES = np.append(2.0 ** (np.arange(255) - 127), np.nan)
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # output of the nibble at bit 4 i


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


def f16_values(bits: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(bits).view(np.float16).astype(np.float64)


def scale_values(scale: np.ndarray, scale_type: str) -> np.ndarray:
    """Stored scales as float64."""
    if scale_type == "e8m0":
        return E8M0_VALUES[scale]
    if scale_type == "f16":
        return f16_values(scale)
    return (bf16_values(scale) if scale_type == "bf16" else scale).astype(np.float64)


def nibbles(bytes_: np.ndarray) -> np.ndarray:
    """Integers [..., 2 n] of n bytes or int32 of four, the low nibble first."""
    octets = np.ascontiguousarray(bytes_).view(np.uint8)
    return np.stack([octets & 15, octets >> 4], -1).reshape(*octets.shape[:-1], -1).astype(int)


def half_nibbles(octets: np.ndarray) -> np.ndarray:
    """Integers [..., 2 n]: the low nibbles of all n bytes, then the high ones."""
    return np.concatenate([octets & 15, octets >> 4], -1).astype(int)


def awq_codes(words: np.ndarray) -> np.ndarray:
    """Codes [rows, 8 n] of int32 [rows, n]."""
    stored = nibbles(words).reshape(len(words), -1, 8)
    codes = np.empty_like(stored)
    codes[:, :, AWQ_ORDER] = stored
    return codes.reshape(len(words), -1)


def gptq_codes(words: np.ndarray) -> np.ndarray:
    """Codes [8 n, cols] of int32 [n, cols]."""
    stored = nibbles(words).reshape(*words.shape, 8)
    return stored.transpose(0, 2, 1).reshape(-1, words.shape[1])


def _k_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima [..., 8] of 12 bytes: 6 bits each."""
    p = packed.astype(int)
    first, second, third = p[..., :4], p[..., 4:8], p[..., 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], -1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], -1)
    return scales, minima


def decode_blocks(format: str, data: np.ndarray) -> np.ndarray:
    """Values [rows, cols] of GGUF rows, uint8 [rows, bytes]."""
    size = BLOCKS[format][1]
    b = np.ascontiguousarray(data).reshape(len(data), -1, size)

    def half(offset: int) -> np.ndarray:
        return f16_values(b[..., offset : offset + 2].copy().view(np.uint16))

    if format == "q8_0":
        values = half(0) * b[..., 2:].view(np.int8)
    elif format == "q4_0":
        values = half(0) * (half_nibbles(b[..., 2:]) - 8)
    elif format == "q5_0":
        fifth = np.unpackbits(b[..., 2:6], axis=-1, bitorder="little").astype(int)
        values = half(0) * ((half_nibbles(b[..., 6:]) | fifth << 4) - 16)
    elif format == "mxfp4_block":
        values = E8M0_VALUES[b[..., :1]] * E2M1_VALUES[half_nibbles(b[..., 1:])]
    elif format == "q6_k":
        low = half_nibbles(b[..., :128].reshape(*b.shape[:2], 2, 64))
        pairs = b[..., 128:192].reshape(*b.shape[:2], 2, 1, 32).astype(int)
        high = (pairs >> np.array([0, 2, 4, 6])[:, None] & 3).reshape(low.shape)
        scales = b[..., 192:208].view(np.int8).astype(int).repeat(16, -1)
        values = half(208) * (scales * ((low | high << 4) - 32).reshape(*b.shape[:2], 256))
    else:
        scales, minima = _k_scales(b[..., 4:16])
        codes = half_nibbles(b[..., -128:].reshape(*b.shape[:2], 4, 32)).reshape(*b.shape[:2], 256)
        if format == "q5_k":
            bits = b[..., None, 16:48].astype(int) >> np.arange(8)[:, None] & 1
            codes = codes | bits.reshape(codes.shape) << 4
        values = half(0) * (scales.repeat(32, -1) * codes) - half(2) * minima.repeat(32, -1)
    return values.reshape(len(data), -1)
