"""How large a terminal is now, and lines that fit it."""

from __future__ import annotations

import os
import shutil
import textwrap
from typing import TextIO


def terminal_size(stream: TextIO) -> tuple[int, int]:
    """Columns and rows of the terminal behind ``stream``; a guess where there is none.

    The terminal is asked first: what COLUMNS and LINES say is out of date after a resize.
    """
    try:
        columns, rows = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        columns, rows = 0, 0
    guess = shutil.get_terminal_size()
    return columns or guess.columns, rows or guess.lines


def fold_words(line: str, stream: TextIO) -> str:
    """``line``; for a terminal broken between words, since terminals break anywhere.

    A word wider than the terminal stays whole for whoever copies it.
    """
    if not stream.isatty():
        return line
    columns = max(terminal_size(stream)[0] - 1, 20)
    return textwrap.fill(line, columns, break_on_hyphens=False, break_long_words=False)
