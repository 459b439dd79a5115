"""Prints the text of an answer as it is, without any escape code."""

from __future__ import annotations

from typing import TextIO

from moechat.terminal.neutralise import neutralise


class PlainPrinter:
    """Writes text as it comes, neutralised and flushed; one newline at the end of the answer."""

    def __init__(self, stdout: TextIO) -> None:
        self._stdout = stdout
        self._held_newlines = 0  # an answer's own last newlines are not printed

    def write(self, text: str) -> None:
        """Print more of the answer."""
        kept = text.rstrip("\n")
        if kept:
            self._stdout.write("\n" * self._held_newlines + neutralise(kept))
            self._stdout.flush()
            self._held_newlines = 0
        self._held_newlines += len(text) - len(kept)

    def finish(self) -> None:
        """End the answer's last line."""
        self._stdout.write("\n")
        self._stdout.flush()
        self._held_newlines = 0
