"""Shows what a model thinks before it answers, so that nobody takes it for the answer."""

from __future__ import annotations

from typing import TextIO

from moechat.terminal.neutralise import neutralise

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class ThinkingPrinter:
    """Writes thinking as it comes, neutralised and flushed: dim, or between two lines that say so.

    Each piece ends in the plain style, so that no interrupt leaves the terminal dim.
    """

    def __init__(self, stream: TextIO, *, dim: bool) -> None:
        self._stream, self._dim = stream, dim
        self._is_open = False

    def write(self, text: str) -> None:
        """Show more of it."""
        if not text:
            return
        begin = "" if self._is_open or self._dim else "[thinking]\n"
        shown = neutralise(text)
        self._is_open = True
        self._stream.write(begin + (f"{_DIM}{shown}{_PLAIN}" if self._dim else shown))
        self._stream.flush()

    def finish(self) -> None:
        """The thinking is over, if there was any; a blank line stands before what follows."""
        if self._is_open:
            self._is_open = False
            self._stream.write("\n\n" if self._dim else "\n[end of thinking]\n\n")
            self._stream.flush()
