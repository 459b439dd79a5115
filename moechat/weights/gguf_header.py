"""The header of a GGUF file: its metadata, and where its tensors' bytes lie.

Layout (github.com/ggml-org/ggml, docs/gguf.md), little endian: "GGUF", version, tensor count, pair
count; key-value pairs; tensor descriptions; padding; the tensors' bytes, each aligned.
"""

from __future__ import annotations

import struct
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moechat.errors import CheckpointDamaged
from moechat.gguf_magic import MAGIC
from moechat.json_file import foreign_content
from moechat.weights.gguf_strings import StringArray, read_strings
from moechat.weights.gguf_types import TYPES
from moechat.weights.safetensors_header import quoted

_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 20
_MAX_DIMENSIONS = 4
_MAX_ELEMENTS = 1 << 48
_MAX_NAME_BYTES = 1 << 16  # of a key, by the format's description
_MAX_TEXT_BYTES = 16_000_000  # of one value; chat templates have under 100 KB
_MAX_PAIRS = 1 << 16
_MAX_TENSORS = 1 << 20
_MIN_PAIR_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8

_UINT32, _UINT64 = struct.Struct("<I"), struct.Struct("<Q")
_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


class TensorSpan(NamedTuple):
    """One tensor of a file: its bytes are ``file[begin_byte:end_byte]``; shape slowest first."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin_byte: int
    end_byte: int


class Header(NamedTuple):
    """``metadata``: int, float, bool, str, numpy array or StringArray by key."""

    metadata: dict[str, Any]
    tensors: list[TensorSpan]


def read_header(path: Path, content: NDArray[np.uint8]) -> Header:
    """Metadata and tensors of the file at ``path``, all spans checked.

    ``content``: uint8 [file size in bytes], a mapping of it; only the header is touched.
    Raises CheckpointDamaged with the file and what is wrong where.
    """
    try:
        return _Reader(path, content).header()
    except ValueError as error:
        why = foreign_content(content[:512].tobytes()) or str(error)
        raise CheckpointDamaged(f"{path} is damaged", why, "Download this file again") from None


class _Reader:
    """A position that moves through the header; every step is checked against the file's size."""

    def __init__(self, path: Path, content: NDArray[np.uint8]) -> None:
        self._path, self._content, self._bytes = path, content, content.data
        self._size_bytes, self._position = len(content), 0

    def header(self) -> Header:
        if self._take(4, "its first bytes") != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number(_UINT32, "its version")
        if version not in _VERSIONS:
            big_endian = version.to_bytes(4, "little")[:2] == b"\0\0"
            kind = "is big-endian" if big_endian else f"has version {version} of the format"
            raise ValueError(f"it {kind}; moechat reads little-endian versions 2 and 3")
        num_tensors = self._count("tensors", _MIN_TENSOR_BYTES, _MAX_TENSORS)
        num_pairs = self._count("pairs of metadata", _MIN_PAIR_BYTES, _MAX_PAIRS)
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._text("a key", _MAX_NAME_BYTES)
            if key in metadata:
                raise ValueError(f"it gives {quoted(key)} twice")
            metadata[key] = self._value(quoted(key))
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        is_power = type(alignment) is int and alignment > 0 and not alignment & (alignment - 1)
        if not is_power or alignment > _MAX_ALIGNMENT:
            raise ValueError(f"its general.alignment {ascii(alignment)[:80]} is no power of two")
        tensors = [self._tensor(alignment) for _ in range(num_tensors)]
        data_begin = -(-self._position // alignment) * alignment
        spans = [
            span._replace(begin_byte=data_begin + span.begin_byte, end_byte=data_begin + span[4])
            for span in tensors
        ]
        _check_spans(spans, self._size_bytes)
        return Header(metadata, spans)

    def _tensor(self, alignment: int) -> TensorSpan:
        """One tensor's description; its span counts from the begin of the data."""
        name = self._text("a tensor's name", _MAX_NAME_BYTES)
        what = f"tensor {quoted(name)}"
        num_dimensions = self._number(_UINT32, what)
        if num_dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"{what} has {num_dimensions} dimensions")
        shape = [self._number(_UINT64, what) for _ in range(num_dimensions)]  # fastest first
        elements = 1
        for size in shape:
            elements *= size
        if not 0 < elements <= _MAX_ELEMENTS:
            raise ValueError(f"{what} has an impossible shape {shape[::-1]}")
        type_number = self._number(_UINT32, what)
        type_ = TYPES.get(type_number)
        if type_ is None:
            raise ValueError(f"{what} has the unknown element type {type_number}")
        row_elements = shape[0] if shape else 1
        if row_elements % type_.block_elements:
            raise ValueError(
                f"{what} has {row_elements} elements a row, which do not fill blocks of "
                f"{type_.block_elements} ({type_.name})"
            )
        begin = self._number(_UINT64, what)
        if begin % alignment:
            raise ValueError(f"{what} begins at {begin}, which is not aligned to {alignment} bytes")
        end = begin + elements // type_.block_elements * type_.block_bytes
        return TensorSpan(name, type_.name, tuple(shape[::-1]), begin, end)

    def _value(self, what: str) -> Any:
        kind = self._number(_UINT32, what)
        if kind == _STRING:
            return self._text(what, _MAX_TEXT_BYTES)
        if kind == _ARRAY:
            return self._array(what)
        if kind not in _NUMBERS:
            raise ValueError(f"{what} has the unknown type {kind}")
        return self._numbers(kind, 1, what)[0].item()

    def _array(self, what: str) -> NDArray[Any] | StringArray:
        kind = self._number(_UINT32, what)
        count = self._number(_UINT64, what)
        if kind == _STRING:
            strings, self._position = read_strings(self._content, self._position, count, what)
            return strings
        if kind not in _NUMBERS:
            raise ValueError(f"{what} is an array of the unsupported type {kind}")
        return self._numbers(kind, count, what)

    def _numbers(self, kind: int, count: int, what: str) -> NDArray[Any]:
        dtype = _NUMBERS[kind]
        raw = self._take(count * dtype.itemsize, what)
        values: NDArray[Any] = np.frombuffer(raw, np.uint8 if kind == _BOOL else dtype)
        # numpy takes any byte for a bool, and would then compute nonsense.
        return values.astype(np.bool_) if kind == _BOOL else values

    def _text(self, what: str, limit_bytes: int) -> str:
        length = self._number(_UINT64, what)
        if length > limit_bytes:
            raise ValueError(f"{what} claims {length} bytes of text")
        try:
            return str(self._take(length, what), "utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{what} is not UTF-8") from None

    def _count(self, what: str, min_bytes: int, limit: int) -> int:
        count = self._number(_UINT64, f"its number of {what}")
        if count > min((self._size_bytes - self._position) // min_bytes, limit):
            raise ValueError(f"it claims {count} {what} and has {self._size_bytes} bytes")
        return count

    def _number(self, layout: struct.Struct, what: str) -> int:
        number: int = layout.unpack(self._take(layout.size, what))[0]
        return number

    def _take(self, size_bytes: int, what: str) -> memoryview:
        begin, end = self._position, self._position + size_bytes
        if end > self._size_bytes:
            raise ValueError(
                f"it is cut short: {what} needs the bytes up to {end} and the file has "
                f"{self._size_bytes}"
            )
        self._position = end
        return self._bytes[begin:end]


def _check_spans(spans: list[TensorSpan], size_bytes: int) -> None:
    """ValueError unless the tensors lie in the file, apart from each other, each named once."""
    for name, times in Counter(span.name for span in spans).most_common(1):
        if times > 1:
            raise ValueError(f"it holds tensor {quoted(name)} twice")
    by_place = sorted(spans, key=lambda span: span.begin_byte)
    for previous, span in pairwise(by_place):
        if span.begin_byte < previous.end_byte:
            raise ValueError(
                f"the bytes of tensors {quoted(previous.name)} and {quoted(span.name)} overlap"
            )
    if by_place and by_place[-1].end_byte > size_bytes:
        last = by_place[-1]
        raise ValueError(
            f"it is cut short: tensor {quoted(last.name)} needs {last.end_byte - last.begin_byte} "
            f"bytes and has {max(size_bytes - last.begin_byte, 0)} (the file needs "
            f"{last.end_byte} bytes and has {size_bytes})"
        )
