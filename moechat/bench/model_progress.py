"""One line on a terminal that tells what is being done."""

from __future__ import annotations

import shutil
import time
from types import TracebackType
from typing import TextIO

_REFRESH_SECONDS = 0.1


class StatusLine:
    """Rewritten in place, without escape codes; nothing where the stream is no terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._shown_columns = 0
        self._shown_at = 0.0

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.show("")

    def show(self, text: str) -> None:
        """Show ``text`` instead of what is there."""
        if not self._is_terminal:
            return
        # A line that wraps could not be erased.
        text = text[: max(shutil.get_terminal_size()[0] - 1, 1)]
        self._stream.write("\r" + text.ljust(self._shown_columns) + ("" if text else "\r"))
        self._stream.flush()
        self._shown_columns = len(text)

    def written(self, done_bytes: int, num_bytes: int) -> None:
        """Bytes of a synthetic model; at most ten times a second."""
        now = time.monotonic()
        if now - self._shown_at >= _REFRESH_SECONDS or done_bytes == num_bytes:
            self._shown_at = now
            self.show(f"writing random weights: {done_bytes / 1e9:.2f} of {num_bytes / 1e9:.2f} GB")
