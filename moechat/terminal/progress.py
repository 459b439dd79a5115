"""A line on stderr that tells how far something long is."""

from __future__ import annotations

from typing import TextIO

from moechat.events import PrefillProgress, Queued
from moechat.sizes import size_text
from moechat.terminal_size import terminal_size

_SHOWN_AFTER_SECONDS = 1.0


class ProgressLine:
    """One line that is rewritten in place, on terminals only, without escape codes."""

    def __init__(self, stderr: TextIO) -> None:
        self._stderr = stderr
        self._is_terminal = stderr.isatty()
        self._shown_columns = 0

    def update(self, event: PrefillProgress | Queued) -> None:
        """Show ``event``; of a prefill, once it has taken more than a second."""
        if isinstance(event, Queued):
            noun = "request" if event.ahead == 1 else "requests"
            self.show(f"waiting for {event.ahead} {noun}")
            return
        if not self._is_terminal or event.seconds <= _SHOWN_AFTER_SECONDS:
            return
        line = f"reading {event.tokens} tokens: layer {event.layers_done}/{event.num_layers}, "
        if event.resumed_layers:
            line += f"resumed at {event.resumed_layers}, "
        if event.stream_bytes_per_second:
            line += f"{size_text(event.stream_bytes_per_second)}/s, "
        line += f"{event.seconds:.0f} s"
        read = event.layers_done - event.resumed_layers
        if read > 0:
            left = event.seconds * (event.num_layers - event.layers_done) / read
            line += f", about {left:.0f} s left"
        self.show(line)

    def show(self, line: str) -> None:
        """Show ``line`` in place of the one before."""
        if not self._is_terminal:
            return
        # A line that wraps could not be erased.
        line = line[: max(terminal_size(self._stderr)[0] - 1, 1)]
        self._stderr.write("\r" + line.ljust(self._shown_columns))
        self._stderr.flush()
        self._shown_columns = len(line)

    def erase(self) -> None:
        """Leave the line blank and the cursor at its start."""
        if self._shown_columns:
            self._stderr.write("\r" + " " * self._shown_columns + "\r")
            self._stderr.flush()
            self._shown_columns = 0
