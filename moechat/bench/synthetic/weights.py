"""Random weights, quickly: a block of random codes for each kind of number, rolled per tensor.

A tensor is made of the block from some place on, again and again: its pages are distinct, which is
what reading speed depends on, and drawing the numbers is not what writing waits for.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from moechat.bench.synthetic.tensors import Part
from moechat.quantize.float_codes import e4m3_to_f32, f32_to_bf16, f32_to_e4m3

_BLOCK_BYTES = 16 << 20
# Where in the block the next tensor begins: odd in words, so that tensors differ.
_ROLL_BYTES = 5_000_004
_FP8_RMS = 24.0  # the largest of 65536 quantiles of a normal is 4.3 times that, 448 the format's
_INT4_RMS, _MXFP4_RMS = 2.3, 1.6
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


class RandomBytes:
    """Writes parts to files, block after block. One instance makes one model, always the same."""

    def __init__(self) -> None:
        self._start = self._next_byte = 0

    def write(self, part: Part, file: BinaryIO, progress: Callable[[int], None]) -> None:
        """The part's bytes at the file's position; ``progress`` is told of bytes as they go."""
        if part.kind in ("ones", "zeros", "scale"):
            file.write(_constant(part))
            progress(part.num_bytes)
            return
        block = _block(part.kind, _exponent(part.rms) if part.kind == "bf16" else 0)
        left = part.num_bytes
        while left:
            piece = block[self._next_byte : self._next_byte + left]
            file.write(piece)
            progress(len(piece))
            left -= len(piece)
            self._next_byte = 0
        self._start = self._next_byte = (self._start + _ROLL_BYTES) % _BLOCK_BYTES


def write_safetensors(
    path: Path, parts: Sequence[Part], random: RandomBytes, progress: Callable[[int], None]
) -> None:
    """One file: header, then the parts in order. OSError is the caller's."""
    header: dict[str, Any] = {}
    begin = 0
    for part in parts:
        end = begin + part.num_bytes
        header[part.name] = {
            "dtype": part.dtype,
            "shape": list(part.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for part in parts:
            random.write(part, file, progress)


def _exponent(rms: float) -> int:
    """BF16 weights get the nearest power of two: one block serves all, its exponents lowered."""
    return round(-math.log2(rms))


def _constant(part: Part) -> bytes:
    if part.kind == "ones":
        return _filled(part, 0x3F80, np.uint16)
    if part.kind == "zeros":
        return bytes(part.num_bytes)
    if part.dtype == "F32":
        return _filled(part, part.rms / rms_of("fp8"), np.float32)
    if part.dtype == "BF16":
        bits = np.array([part.rms / rms_of("int4")], np.float32)
        return _filled(part, int(f32_to_bf16(bits)[0]), np.uint16)
    # E8M0 of MXFP4.
    return _filled(part, round(math.log2(part.rms / rms_of("mxfp4"))) + 127, np.uint8)


def _filled(part: Part, value: float, dtype: type[np.generic]) -> bytes:
    return np.full(math.prod(part.shape), value, dtype).tobytes()


@cache
def _quantiles(count: int) -> NDArray[np.float32]:
    """``count`` values that are distributed as a standard normal."""
    normal = NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)], np.float32)


@cache
def _table(kind: str) -> NDArray[Any]:
    """Codes by the random number that chooses them: 65536 of BF16 and FP8, 256 nibbles."""
    if kind == "bf16":
        return f32_to_bf16(_quantiles(1 << 16))
    if kind == "fp8":
        return f32_to_e4m3(_quantiles(1 << 16) * np.float32(_FP8_RMS))
    if kind == "int4":
        # -8 is left out: with it the codes would not be centred.
        nibbles: NDArray[Any] = np.clip(np.rint(_quantiles(256) * _INT4_RMS), -7, 7) + 8
        return nibbles.astype(np.uint8)
    values: NDArray[Any] = _quantiles(256) * np.float32(_MXFP4_RMS)
    nearest = np.abs(np.abs(values)[:, None] - _E2M1).argmin(axis=1)
    codes: NDArray[np.uint8] = (nearest + 8 * (values < 0)).astype(np.uint8)
    return codes


@cache
def rms_of(kind: str) -> float:
    """Root mean square of the values of a block's codes, before any scale."""
    table = _table(kind)
    if kind == "fp8":
        values = e4m3_to_f32(table)
    elif kind == "int4":
        values = table.astype(np.float32) - 8
    else:
        values = _E2M1[table & 7]
    return float(np.sqrt(np.mean(np.square(values.astype(np.float64)))))


@cache
def _block(kind: str, exponent: int) -> memoryview:
    """Random codes, with 2^-exponent in BF16's."""
    if exponent:
        values = np.frombuffer(_block(kind, 0), np.uint16)
        lowered: NDArray[np.uint8] = (values - np.uint16(exponent << 7)).view(np.uint8)
        return lowered.data
    generator = np.random.Generator(np.random.SFC64(20))
    table = _table(kind)
    if kind == "bf16":
        codes = table[generator.integers(0, 1 << 16, _BLOCK_BYTES // 2, np.uint16)]
    elif kind == "fp8":
        codes = table[generator.integers(0, 1 << 16, _BLOCK_BYTES, np.uint16)]
    else:
        nibbles = table[np.frombuffer(generator.bytes(2 * _BLOCK_BYTES), np.uint8)]
        codes = nibbles[::2] | nibbles[1::2] << 4
    return np.ascontiguousarray(codes).view(np.uint8).data
