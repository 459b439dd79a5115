"""The header of a safetensors file: which tensors it holds, and where.

Layout: 8 bytes little-endian header length, a JSON object, then the tensors' bytes without gaps.
The safetensors library checks the same rules but does not say where a tensor's bytes lie.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moechat.errors import CheckpointDamaged
from moechat.json_file import foreign_content, parse_json_object

ELEMENT_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}

# The format's own limit; DeepSeek-V3's largest header has under 100 KB.
_HEADER_LIMIT_BYTES = 100_000_000
_MAX_DIMENSIONS = 8
_MAX_ELEMENTS = 1 << 48


class TensorSpan(NamedTuple):
    """One tensor of a file: its bytes are ``file[begin_byte:end_byte]``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin_byte: int
    end_byte: int


def read_header(path: Path, content: NDArray[np.uint8]) -> list[TensorSpan]:
    """Tensors of the file at ``path`` in order of their bytes, all spans checked.

    ``content``: uint8 [file size in bytes], a mapping of it; only the header is touched.
    Raises CheckpointDamaged with the file, the tensor, and the bytes needed and present.
    """
    try:
        return _read_header(content)
    except ValueError as error:
        why = foreign_content(content[:512].tobytes()) or str(error)
        raise CheckpointDamaged(f"{path} is damaged", why, "Download this file again") from None


def _read_header(content: NDArray[np.uint8]) -> list[TensorSpan]:
    file_bytes = len(content)
    if file_bytes < 8:
        raise ValueError(f"it has {file_bytes} bytes, too few for a safetensors header")
    header_bytes = int.from_bytes(content[:8].tobytes(), "little")
    if header_bytes > min(file_bytes - 8, _HEADER_LIMIT_BYTES):
        raise ValueError(
            f"its header claims {header_bytes} bytes, and {file_bytes - 8} bytes follow its length"
        )
    data_begin = 8 + header_bytes
    try:
        header = parse_json_object(content[8:data_begin].tobytes())
    except ValueError as error:
        raise ValueError(f"its header cannot be read: {error}") from None
    header.pop("__metadata__", None)
    spans = [_span(name, entry, data_begin) for name, entry in header.items()]
    spans.sort(key=lambda span: (span.begin_byte, span.end_byte))
    _check_cover(spans, data_begin, file_bytes)
    return spans


def _span(name: str, entry: Any, data_begin: int) -> TensorSpan:
    """One header entry; ValueError unless its shape and type fill its span exactly."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"tensor {quoted(name)} has no dtype, shape and pair of data_offsets"
        ) from None
    element_bytes = ELEMENT_BYTES.get(dtype) if isinstance(dtype, str) else None
    if element_bytes is None:
        raise ValueError(f"tensor {quoted(name)} has the unknown type {ascii(dtype)[:80]}")
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end:
        raise ValueError(
            f"tensor {quoted(name)} has impossible data_offsets {ascii(entry['data_offsets'])[:80]}"
        )
    if type(shape) is not list or len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"tensor {quoted(name)} has an impossible shape {ascii(shape)[:80]}")
    elements = nonzero_elements = 1
    for size in shape:
        if type(size) is not int or size < 0:
            raise ValueError(f"tensor {quoted(name)} has an impossible shape {ascii(shape)[:80]}")
        elements *= size
        nonzero_elements *= size or 1
    if nonzero_elements > _MAX_ELEMENTS:
        raise ValueError(f"tensor {quoted(name)} has an impossible shape {ascii(shape)[:80]}")
    if elements * element_bytes != end - begin:
        raise ValueError(
            f"tensor {quoted(name)} ({dtype} {shape}) needs {elements * element_bytes} bytes "
            f"and has {end - begin}"
        )
    return TensorSpan(name, dtype, tuple(shape), data_begin + begin, data_begin + end)


def _check_cover(spans: list[TensorSpan], data_begin: int, file_bytes: int) -> None:
    """ValueError unless the sorted spans cover the file to its end, once."""
    position, previous = data_begin, "the header"
    for name, _, _, begin, end in spans:
        if begin < position:
            raise ValueError(f"the bytes of tensor {quoted(name)} overlap those of {previous}")
        if begin > position:
            raise ValueError(
                f"{begin - position} bytes before tensor {quoted(name)} belong to no tensor"
            )
        if end > file_bytes:
            needed_bytes = max(span.end_byte for span in spans)
            raise ValueError(
                f"it is cut short: tensor {quoted(name)} needs {end - begin} bytes and has "
                f"{max(file_bytes - begin, 0)} (the file needs {needed_bytes} bytes and has "
                f"{file_bytes})"
            )
        position, previous = end, f"tensor {quoted(name)}"
    if position != file_bytes:
        raise ValueError(f"{file_bytes - position} bytes at its end belong to no tensor")


def quoted(name: str) -> str:
    """A name from a file for a message: escaped, in quotes, of bounded length."""
    return ascii(name if len(name) <= 120 else name[:117] + "...")
