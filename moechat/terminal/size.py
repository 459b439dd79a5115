"""How large a terminal is now."""

from __future__ import annotations

import os
import shutil
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
