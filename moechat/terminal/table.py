"""Tables of text that fit a terminal without cutting a word."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from typing import TextIO

from moechat.terminal_size import terminal_size

_GAP = 2
_INDENT = 4  # of the columns that go below
_LONG_WORD = 24  # paths and the like: they move no column


def columns_of(stream: TextIO) -> int:
    """How wide a line for ``stream`` may be: a terminal's width less one, else without a limit."""
    return max(terminal_size(stream)[0] - 1, 20) if stream.isatty() else sys.maxsize


def table_lines(rows: Sequence[Sequence[str]], columns: int, indent: int = 0) -> list[str]:
    """``rows``, equally long, in aligned columns; no line is longer than ``columns``.

    The last column is wrapped between words. Columns for which there is no room go below the
    others, further in. Only a cell or a word that alone is too wide makes a longer line.
    """
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    last = len(widths) - 1
    words = [word for row in rows for word in row[last].split()]
    longest_word = min(max(map(len, words), default=0), _LONG_WORD)
    parts: list[list[tuple[int, int]]] = [[]]  # of each line: columns of the table, their places
    place = indent
    for index, width in enumerate(widths):
        least = longest_word if index == last else width
        if parts[-1] and place + least > columns:
            parts.append([])
            place = indent + _INDENT
        parts[-1].append((index, place))
        place += width + _GAP
    return [line for row in rows for part in parts for line in _part_lines(row, part, columns)]


def _part_lines(row: Sequence[str], part: list[tuple[int, int]], columns: int) -> list[str]:
    """The cells of some columns: one line, more where the last cell is wrapped."""
    head = ""
    for index, place in part:
        if index == len(row) - 1:
            room = max(columns - place, 1)
            wrapped = textwrap.wrap(
                row[index], room, break_long_words=False, break_on_hyphens=False
            ) or [""]
            lines = [(head.ljust(place) + wrapped[0]).rstrip()]
            return [*lines, *(" " * place + rest for rest in wrapped[1:])]
        head = head.ljust(place) + row[index]
    return [head.rstrip()]
