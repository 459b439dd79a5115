"""Where the events of an answer go when nobody edits: text to stdout, all else to stderr."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TextIO

from moechat.errors import MoechatError
from moechat.events import Event, Finished, PrefillProgress, Queued
from moechat.terminal.neutralise import one_line
from moechat.terminal.plain_printer import PlainPrinter
from moechat.terminal.progress import ProgressLine
from moechat.terminal.stats_text import cut_note, stats_json, stats_line
from moechat.terminal.thinking_printer import ThinkingPrinter
from moechat.terminal_size import fold_words


def format_error(error: MoechatError) -> str:
    """The one line that tells a user of ``error``."""
    return f"error: {one_line(error.message)} [{error.name}]"


def escapes_allowed(stream: TextIO) -> bool:
    """Whether escape codes may be written to ``stream``: a terminal that wants them."""
    dumb = os.environ.get("TERM", "") in ("dumb", "unknown")
    return stream.isatty() and not os.environ.get("NO_COLOR") and not dumb


class PlainSink:
    """Writes one answer as it comes.

    The text goes to ``stdout``, flushed with every event that carries some, its control characters
    neutralised, with exactly one newline at its end. Progress, a note that the answer was cut and
    the counters go to ``stderr``. ``stats`` is "none", "line" or "json". Thinking goes to
    ``thinking``, or nowhere, and never to ``stdout``.
    """

    def __init__(
        self,
        stdout: TextIO,
        stderr: TextIO,
        *,
        stats: str = "none",
        context_tokens: int = 0,
        thinking: ThinkingPrinter | None = None,
    ) -> None:
        self._printer = PlainPrinter(stdout)
        self._stderr, self._thinking = stderr, thinking
        self._has_text = False
        self._stats, self._context_tokens = stats, context_tokens
        self._progress = ProgressLine(stderr)

    def consume(self, events: Iterable[Event]) -> Finished | None:
        """Write all ``events``; the last one, or None if they ended without it."""
        finished = None
        try:
            for event in events:
                self.write(event)
                if isinstance(event, Finished):
                    finished = event
        finally:
            self._progress.erase()
            if finished is None:  # an error follows: it needs a line of its own
                if self._thinking is not None:
                    self._thinking.finish()
                if self._has_text:
                    self._printer.finish()
        return finished

    def write(self, event: Event) -> None:
        """Write one event."""
        if isinstance(event, PrefillProgress | Queued):
            self._progress.update(event)
            return
        self._progress.erase()
        if self._thinking is not None:
            self._thinking.write(event.reasoning)
            if event.text or isinstance(event, Finished):
                self._thinking.finish()
        self._printer.write(event.text)
        self._has_text = self._has_text or bool(event.text)
        if isinstance(event, Finished):
            self._printer.finish()
            print_closing(
                self._stderr, event, self._stats, self._context_tokens, has_text=self._has_text
            )


def print_closing(
    stderr: TextIO,
    finished: Finished,
    stats: str,
    context_tokens: int,
    *,
    has_text: bool = True,
) -> None:
    """What follows an answer on ``stderr``: the note that it was cut, and the counters.

    ``has_text``: there was an answer, not thinking alone.
    """
    note = cut_note(finished, context_tokens, has_text)
    lines = [fold_words(f"[{note}]", stderr)] if note else []
    if stats == "line":
        lines.append(fold_words(f"[{stats_line(finished)}]", stderr))
    elif stats == "json":
        lines.append(stats_json(finished))
    if lines:
        stderr.write("\n".join(lines) + "\n")
        stderr.flush()
