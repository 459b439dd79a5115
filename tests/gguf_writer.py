"""Writes GGUF files as the format's description has them, for tests (docs/gguf.md of ggml)."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np

from moechat.weights.gguf_types import TYPES

TYPE_NUMBERS = {type_.name: number for number, type_ in TYPES.items()}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBER_TYPES = {
    "uint8": 0,
    "int8": 1,
    "uint16": 2,
    "int16": 3,
    "uint32": 4,
    "int32": 5,
    "float32": 6,
    "bool": _BOOL,
    "uint64": 10,
    "int64": 11,
    "float64": 12,
}


class Blocks(NamedTuple):
    """A tensor whose bytes are as the type stores them: uint8 [..., bytes of a row]."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray


def gguf_bytes(
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray | Blocks] | None = None,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """A whole file. int becomes uint32, float float32; numpy scalars and arrays keep their type.

    Tensors: float32, float16, or Blocks (BF16 too).
    """
    tensors = {name: as_blocks(tensor) for name, tensor in (tensors or {}).items()}
    head = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    head += [string(key) + value(item) for key, item in metadata.items()]
    data, offset = [], 0
    for name, tensor in tensors.items():
        head.append(tensor_info(name, tensor.shape, TYPE_NUMBERS[tensor.dtype], offset))
        raw = tensor.data.tobytes()
        raw += bytes(-len(raw) % alignment)
        data.append(raw)
        offset += len(raw)
    header = b"".join(head)
    return b"".join([header, bytes(-len(header) % alignment), *data])


def as_blocks(tensor: np.ndarray | Blocks) -> Blocks:
    if isinstance(tensor, Blocks):
        return tensor
    dtype = {"float32": "F32", "float16": "F16", "int32": "I32"}[tensor.dtype.name]
    return Blocks(dtype, tensor.shape, tensor)


def bf16(values: np.ndarray) -> Blocks:
    """float32 values that BF16 holds exactly."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any()
    return Blocks("BF16", values.shape, (bits >> 16).astype(np.uint16))


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    """Type and value of one metadata entry."""
    if isinstance(item, str):
        return struct.pack("<I", _STRING) + string(item)
    if isinstance(item, (list, tuple)) and item and isinstance(item[0], str):
        head = struct.pack("<IIQ", _ARRAY, _STRING, len(item))
        return head + b"".join(map(string, item))
    if isinstance(item, (bool, int, float)):
        item = {bool: np.bool_, int: np.uint32, float: np.float32}[type(item)](item)
    if isinstance(item, np.ndarray | list | tuple):
        array = np.asarray(item)
        if not isinstance(item, np.ndarray) and array.dtype == np.int64:
            array = array.astype(np.int32)
        number = _NUMBER_TYPES[array.dtype.name]
        return struct.pack("<IIQ", _ARRAY, number, array.size) + array.tobytes()
    return struct.pack("<I", _NUMBER_TYPES[item.dtype.name]) + item.tobytes()


def tensor_info(name: str, shape: tuple[int, ...], type_number: int, offset: int) -> bytes:
    """One tensor's description; ``shape`` slowest first."""
    sizes = struct.pack(f"<{len(shape)}Q", *reversed(shape))
    return (
        string(name)
        + struct.pack("<I", len(shape))
        + sizes
        + struct.pack("<IQ", type_number, offset)
    )
