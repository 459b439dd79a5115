"""Rows of a stored layer as float32, whatever its format; and the bytes of a tensor as they are.

Files are read, not looked at through their mapping: so the memory in use stays small on every
gauge, and a bad disk is an error instead of a signal.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moechat.errors import CheckpointDamaged
from moechat.quantize.float_codes import (
    bf16_to_f32,
    e4m3_has_nan,
    e4m3_to_f32,
    e8m0_to_f32,
)
from moechat.quantize.fp8 import BLOCK
from moechat.quantize.source import MXFP4_GROUP, Layer
from moechat.weights.mapped import StoredTensor
from moechat.weights.safetensors_header import quoted

# e2m1: sign, two bits of exponent, one of mantissa (OCP microscaling formats, section 5.3.3)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1_PAIRS = np.stack(
    [np.tile(np.concatenate([_E2M1, -_E2M1]), 16), np.repeat(np.concatenate([_E2M1, -_E2M1]), 16)],
    axis=-1,
)  # [byte, 2]: the low nibble first
_NIBBLES = np.arange(0, 32, 4, dtype=np.uint32)


class Reader:
    """Reads tensors from their files, which it opens when needed; ``close`` at the end."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            os.close(file)
        self._files = {}

    def raw(self, tensor: StoredTensor, begin: int, end: int) -> NDArray[np.uint8]:
        """Bytes [begin, end) of a tensor. Raises CheckpointDamaged when they cannot be read."""
        buffer = np.empty(end - begin, np.uint8)
        what = f"{tensor.file} cannot be read"
        try:
            if tensor.file not in self._files:
                self._files[tensor.file] = os.open(tensor.file, os.O_RDONLY | os.O_CLOEXEC)
            file, done = self._files[tensor.file], 0
            while done < len(buffer):
                position = tensor.begin_byte + begin + done
                count = os.preadv(file, [buffer.data[done:]], position)
                if not count:
                    raise CheckpointDamaged(what, "it became shorter in the meantime")
                done += count
        except OSError as error:
            raise CheckpointDamaged(what, error.strerror or str(error)) from None
        return buffer

    def values(self, layer: Layer, first: int, last: int) -> NDArray[np.float32]:
        """Rows [first, last) of a layer as finite float32 [last - first, cols].

        Of MXFP4 they must be whole groups of one expert. Raises CheckpointDamaged for NaN and
        infinity.
        """
        if layer.storage == "mxfp4":
            values = self._mxfp4(layer, first, last)
        elif layer.storage == "int4":
            values = self._int4(layer, first, last)
        elif layer.storage == "plain":
            values = self._plain(layer.weight, layer.cols, first, last)
        else:
            values = self._fp8(layer, first, last)
        if not np.isfinite(values).all():
            raise _not_finite(layer.weight)
        return values

    def _plain(self, tensor: StoredTensor, cols: int, first: int, last: int) -> NDArray[np.float32]:
        """Rows of an F32, F16 or BF16 tensor, its shape seen as [rows, cols]."""
        row_bytes = cols * (4 if tensor.dtype == "F32" else 2)
        raw = self.raw(tensor, first * row_bytes, last * row_bytes)
        shape = (last - first, cols)
        if tensor.dtype == "F32":
            return raw.view(np.float32).reshape(shape)
        if tensor.dtype == "BF16":
            return bf16_to_f32(raw.view(np.uint16)).reshape(shape)
        return raw.view(np.float16).astype(np.float32).reshape(shape)

    def _fp8(self, layer: Layer, first: int, last: int) -> NDArray[np.float32]:
        cols, scale = layer.cols, _scale_of(layer)
        codes = self.raw(layer.weight, first * cols, last * cols).reshape(-1, cols)
        if e4m3_has_nan(codes):
            raise _not_finite(layer.weight)
        values = e4m3_to_f32(codes)
        if layer.storage == "fp8_channel":
            values *= self._plain(scale, 1, first, last)
            return values
        row = first
        while row < last:
            block = row // BLOCK
            end = min((block + 1) * BLOCK, last)
            scale_b = self._plain(scale, -(-cols // BLOCK), block, block + 1)[0]
            values[row - first : end - first] *= np.repeat(scale_b, BLOCK)[:cols]
            row = end
        return values

    def _int4(self, layer: Layer, first: int, last: int) -> NDArray[np.float32]:
        cols, scale = layer.cols, _scale_of(layer)
        packed = self.raw(layer.weight, first * cols // 2, last * cols // 2).view(np.uint32)
        nibbles = (packed[:, None] >> _NIBBLES) & np.uint32(15)
        values: NDArray[np.float32] = nibbles.astype(np.float32)
        values -= 8
        num_groups = scale.shape[1]
        grouped = values.reshape(last - first, num_groups, cols // num_groups)
        grouped *= self._plain(scale, num_groups, first, last)[:, :, None]
        return values.reshape(last - first, cols)

    def _mxfp4(self, layer: Layer, first: int, last: int) -> NDArray[np.float32]:
        _, inputs, outputs = layer.shape
        expert, row = divmod(first, inputs)
        groups = slice(row // MXFP4_GROUP, (row + last - first) // MXFP4_GROUP)
        # Stored by outputs: the slab of some inputs is no run of bytes, so the mapping serves.
        blocks = layer.weight.array[expert, :, groups]
        exponents = _scale_of(layer).array[expert, :, groups]
        if (exponents == 255).any():
            raise _not_finite(_scale_of(layer))
        values = _E2M1_PAIRS[blocks]  # [outputs, groups, 16, 2]
        values *= e8m0_to_f32(exponents)[:, :, None, None]
        transposed: NDArray[np.float32] = np.ascontiguousarray(values.reshape(outputs, -1).T)
        return transposed


def cannot_quantise(tensor: StoredTensor, holds: str) -> CheckpointDamaged:
    """The error for a tensor that holds what cannot be quantised."""
    return CheckpointDamaged(
        f"{tensor.file} cannot be quantised", f"{quoted(tensor.name)} holds {holds}"
    )


def _not_finite(tensor: StoredTensor) -> CheckpointDamaged:
    """The error for a weight that is NaN or infinite, or has such a scale."""
    return cannot_quantise(tensor, "NaN or infinite values")


def _scale_of(layer: Layer) -> StoredTensor:
    """The scale of a layer that has one."""
    assert layer.scale is not None
    return layer.scale
