"""How public quantised checkpoints store a linear layer.

Each function takes a module's float32 weight [outputs, inputs] and returns its stored parts, keyed
by what follows the module's name, and the float32 weight [outputs, inputs] that they stand for.
"""

from __future__ import annotations

import numpy as np
from oracle_formats import FP8_MAX, Stored, from_bf16, from_e4m3, spread, to_bf16, to_e4m3

Packed = tuple[dict[str, Stored], np.ndarray]

# AWQ's GEMM layout: nibble k of a word holds the output at this place of its eight.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def fp8_channel(weight: np.ndarray, scale_dtype: str) -> Packed:
    """compressed-tensors float-quantized by channel: BF16 or F32 scales [outputs, 1]."""
    scale = np.abs(weight).max(1, keepdims=True) / np.float32(FP8_MAX)
    stored_scale = Stored("F32", scale)
    if scale_dtype == "BF16":
        stored_scale = Stored("BF16", to_bf16(scale))
        scale = from_bf16(stored_scale.array)
    codes = to_e4m3(np.clip(weight / scale, -FP8_MAX, FP8_MAX))
    parts = {".weight": Stored("F8_E4M3", codes), ".weight_scale": stored_scale}
    return parts, from_e4m3(codes) * scale


def int4_packed(weight: np.ndarray, group: int, shape_dtype: str) -> Packed:
    """compressed-tensors pack-quantized, symmetric: eight inputs an int32, low nibble first.

    A nibble is the value plus 8. ``weight_shape`` is I64 as the library writes it, or I32.
    """
    outputs, inputs = weight.shape
    largest = np.abs(weight).reshape(outputs, -1, group).max(-1)
    scale_bits = to_bf16(largest / np.float32(7.5))
    scale = spread(from_bf16(scale_bits), outputs, inputs, (1, group))
    values = np.clip(np.rint(weight / scale), -8, 7)
    shape = np.array([outputs, inputs], {"I64": np.int64, "I32": np.int32}[shape_dtype])
    parts = {
        ".weight_packed": Stored("I32", _words(values + 8)),
        ".weight_scale": Stored("BF16", scale_bits),
        ".weight_shape": Stored(shape_dtype, shape),
    }
    return parts, (values * scale).astype(np.float32)


def awq(weight: np.ndarray, group: int) -> Packed:
    """AutoAWQ's GEMM layout: eight outputs an int32, interleaved; parts are [inputs, outputs]."""
    groups = np.arange(weight.shape[1]) // group
    codes, zeros, scale, values = _asymmetric(weight, groups, smallest_zero=0)
    parts = {
        ".qweight": Stored("I32", _words(codes.T, AWQ_ORDER)),
        ".qzeros": Stored("I32", _words(zeros.T, AWQ_ORDER)),
        ".scales": Stored("F16", scale.T),
    }
    return parts, values


def gptq(weight: np.ndarray, group: int, act_order: bool) -> Packed:
    """AutoGPTQ's format 1: eight inputs an int32 of [inputs / 8, outputs], zero points less one.

    With ``act_order`` inputs join their groups in the order of their norms, which g_idx tells. A
    zero point of 0 is not used: stored as 15, readers of this format disagree on what it means.
    """
    groups = np.arange(weight.shape[1]) // group
    if act_order:
        by_norm = np.argsort(-np.square(weight).sum(0), kind="stable")
        groups[by_norm] = groups.copy()
    codes, zeros, scale, values = _asymmetric(weight, groups, smallest_zero=1)
    parts = {
        ".qweight": Stored("I32", _words(codes).T),
        ".qzeros": Stored("I32", _words(zeros.T - 1)),
        ".scales": Stored("F16", scale.T),
        ".g_idx": Stored("I32", groups.astype(np.int32)),
    }
    return parts, values


def _asymmetric(
    weight: np.ndarray, groups: np.ndarray, smallest_zero: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """4-bit codes [outputs, inputs] with value = (code - zero) * scale, and these.

    ``groups`` [inputs] is each input's group; zeros and F16 scales are [outputs, groups].
    """
    members = [weight[:, groups == group] for group in range(groups.max() + 1)]
    low = np.stack([part.min(1) for part in members], 1)
    high = np.stack([part.max(1) for part in members], 1)
    scale = ((high - low) / 15).astype(np.float16)
    wide = scale.astype(np.float32)
    zeros = np.clip(np.rint(-low / wide), smallest_zero, 15)
    codes = np.clip(np.rint(weight / wide[:, groups]) + zeros[:, groups], 0, 15)
    return codes, zeros, scale, ((codes - zeros[:, groups]) * wide[:, groups]).astype(np.float32)


def _words(codes: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """int32 [rows, cols / 8]; nibble k, the lowest first, is the code at place order[k] of 8."""
    eights = codes.astype(np.uint32).reshape(codes.shape[0], -1, 8)
    words = sum(eights[..., place] << (4 * k) for k, place in enumerate(order))
    return np.asarray(words, np.uint32).view(np.int32)
