"""Arrays of strings in a GGUF header: found at once, decoded only when somebody looks.

A vocabulary has 150,000 to 260,000 tokens and as many merges; opening a file must not wait for
Python strings of them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import overload

import numpy as np
from numpy.typing import NDArray

_LENGTH = struct.Struct("<Q")
_MAX_STRINGS = 1 << 22


class StringArray(Sequence[str]):
    """The strings of one metadata array. Reading one raises ValueError when it is not UTF-8."""

    def __init__(self, content: NDArray[np.uint8], bounds: NDArray[np.int64], what: str) -> None:
        # String i, without its length, is content[bounds[i] + 8 : bounds[i + 1]].
        self._content, self._bounds, self._what = content, bounds, what

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return self.tolist()[index]
        position = range(len(self))[index]
        begin, end = self._bounds[position] + _LENGTH.size, self._bounds[position + 1]
        return self._decode(self._content[begin:end].tobytes(), position)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tolist())

    def index(self, value: str, start: int = 0, stop: int | None = None) -> int:
        """The position of the first string equal to ``value``; no other string is decoded."""
        begins = self._bounds[:-1]
        positions = range(len(self))[start:stop]
        wanted = value.encode("utf-8", "surrogatepass")
        needle = _LENGTH.pack(len(wanted)) + wanted
        if positions:
            first = int(begins[positions[0]])
            text = self._content[first : int(self._bounds[positions[-1] + 1])].tobytes()
            place = text.find(needle)
            while place >= 0:
                # The same bytes may also lie across strings, or within one.
                position = int(np.searchsorted(begins, first + place))
                if position < len(begins) and begins[position] == first + place:
                    return position
                place = text.find(needle, place + 1)
        raise ValueError(f"{value!a} is not among the strings of {self._what}")

    def tolist(self) -> list[str]:
        """All strings, decoded in one go."""
        first = int(self._bounds[0])
        text = self._content[first : int(self._bounds[-1])].tobytes()
        bounds = (self._bounds - first).tolist()
        try:
            return [str(text[begin + 8 : end], "utf-8") for begin, end in pairwise(bounds)]
        except UnicodeDecodeError:
            return [self[position] for position in range(len(self))]  # names the first bad one

    def _decode(self, text: bytes, position: int) -> str:
        try:
            return str(text, "utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"string {position} of {self._what} is not UTF-8") from None


def read_strings(
    content: NDArray[np.uint8], position: int, count: int, what: str
) -> tuple[StringArray, int]:
    """The ``count`` strings at byte ``position`` of ``content``, and the byte behind them.

    Raises ValueError, naming ``what``, when they do not fit in.
    """
    if count > min((len(content) - position) // _LENGTH.size, _MAX_STRINGS):
        raise ValueError(f"{what} claims {count} strings and the file has {len(content)} bytes")
    length_at, buffer = _LENGTH.unpack_from, content.data
    bounds = [position] * (count + 1)
    try:
        for index in range(count):
            position += _LENGTH.size + length_at(buffer, position)[0]
            bounds[index + 1] = position
    except (struct.error, OverflowError):  # the next length lies beyond the end of the file
        position = len(content) + 1
    if position > len(content):
        raise ValueError(f"it is cut short: the strings of {what} do not end within the file")
    return StringArray(content, np.array(bounds, np.int64), what), position
