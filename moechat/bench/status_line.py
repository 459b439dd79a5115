"""One line on stderr that tells what a measurement is doing."""

from __future__ import annotations

import shutil
from typing import TextIO


class StatusLine:
    """A line that is rewritten in place, on terminals only, without escape codes."""

    def __init__(self, stderr: TextIO) -> None:
        self._stderr = stderr
        self._is_terminal = stderr.isatty()
        self._shown = ""

    def show(self, line: str) -> None:
        """Put ``line`` in place of what is shown; an empty one leaves the line blank."""
        if not self._is_terminal or line == self._shown:
            return
        # A line that wraps could not be erased.
        line = line[: max(shutil.get_terminal_size().columns - 1, 1)]
        self._stderr.write("\r" + line.ljust(len(self._shown)) + ("" if line else "\r"))
        self._stderr.flush()
        self._shown = line

    def erase(self) -> None:
        """Leave the line blank and the cursor at its start."""
        self.show("")
