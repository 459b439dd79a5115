"""Shows Markdown on a terminal while it is being written.

Finished blocks are printed once and stay in the scrollback; only the open block at the end is drawn
again. It is kept short and lower than the screen, so the cost is linear and nothing scrolls away
that would have to be erased.
"""

from __future__ import annotations

import functools
import re
import time
from typing import Any, TextIO

from moechat.terminal.markdown_blocks import Block, BlockSplitter
from moechat.terminal.neutralise import neutralise
from moechat.terminal_size import terminal_size

_MAX_TAIL_CHARACTERS = 2000
_MIN_SECONDS_BETWEEN_DRAWS = 0.03
_IDLE_PER_DRAW = 4  # drawing takes at most a fifth of the time, at any speed of the model
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
# Rich fills rows with blanks, which a terminal that becomes narrower would wrap.
_PADDING = re.compile(r" +((?:\x1b\[[0-9;]*m)*)$", re.MULTILINE)


class MarkdownPrinter:
    """Writes one answer to a terminal that takes escape codes."""

    def __init__(self, stdout: TextIO) -> None:
        self._stdout = stdout
        self._splitter = BlockSplitter()
        self._renderer = _Renderer(stdout)
        self._drawn_rows = 0  # of the tail, above the cursor
        self._is_first = True
        self._next_draw_seconds = 0.0
        self._waiting: list[Block] = []

    def write(self, text: str) -> None:
        """Show more of the answer."""
        self._waiting += self._splitter.push(neutralise(text))
        if time.monotonic() >= self._next_draw_seconds:
            self._draw()

    def finish(self) -> None:
        """The answer is over: nothing stays open."""
        self._waiting += self._splitter.flush()
        self._draw()

    def _draw(self) -> None:
        started = time.monotonic()
        columns, rows = terminal_size(self._stdout)
        out = [f"\r\x1b[{self._drawn_rows}A\x1b[J"] if self._drawn_rows else []
        out += [self._commit(block, columns) for block in self._waiting]
        self._waiting.clear()
        while True:
            tail = self._splitter.tail
            drawn = self._renderer.render(tail, columns) if tail.source.strip() else ""
            too_long = len(tail.source) > _MAX_TAIL_CHARACTERS
            if not too_long and drawn.count("\n") < max(rows - 1, 2):
                break
            # Halving ends: a screen of one or two rows holds no more than a few characters.
            limit = min(_MAX_TAIL_CHARACTERS, max(len(tail.source) // 2, 1))
            out.append(self._commit(self._splitter.cut(limit), columns))
            if len(tail.source) <= 1:
                drawn = ""
                break
        if drawn and tail.gap_before and not self._is_first:
            drawn = "\n" + drawn
        self._drawn_rows = drawn.count("\n")
        self._stdout.write("".join([*out, drawn]))
        self._stdout.flush()
        now = time.monotonic()
        pause = max(_MIN_SECONDS_BETWEEN_DRAWS, _IDLE_PER_DRAW * (now - started))
        self._next_draw_seconds = now + pause

    def _commit(self, block: Block, columns: int) -> str:
        gap = "\n" if block.gap_before and not self._is_first else ""
        self._is_first = False
        return gap + self._renderer.render(block, columns)


class _Renderer:
    """Blocks to lines of text with escape codes, each line ended, by rich."""

    def __init__(self, stdout: TextIO) -> None:
        from rich.console import Console
        from rich.syntax import Syntax
        from rich.theme import Theme

        self._console = Console(
            file=stdout,
            force_terminal=True,
            markup=False,
            emoji=False,
            highlight=False,
            theme=Theme({"markdown.code": "cyan"}),  # rich's has a black ground
        )
        self._new_syntax = Syntax
        self._syntaxes: dict[str, Any] = {}

    def render(self, block: Block, columns: int) -> str:
        """The rows of ``block``. One column stays free: terminals disagree on wide characters."""
        self._console.width = max(columns - 1, 1)
        with self._console.capture() as capture:
            if block.kind == "code":
                self._console.print(self._code(block), no_wrap=False, overflow="fold")
            else:
                self._console.print(_markdown(block.source))
        rows = _PADDING.sub(r"\1", capture.get()).split("\n")
        while len(rows) > 1 and _is_blank(rows[-1]):
            rows.pop()
        while len(rows) > 1 and _is_blank(rows[0]):
            del rows[0]
        return "\n".join(rows) + "\n"

    def _code(self, block: Block) -> Any:
        language = block.language.split(maxsplit=1)[0][:40] if block.language else "text"
        if language not in self._syntaxes:
            self._syntaxes[language] = self._new_syntax(
                "", language, theme="ansi_dark", background_color="default"
            )
        # Line by line, so that a line is final as soon as it ends.
        text = self._syntaxes[language].highlight(block.source)
        text.rstrip()
        return text


def _is_blank(row: str) -> bool:
    return not _STYLE.sub("", row).strip()


def _markdown(source: str) -> Any:
    """A rich renderable that shows every character which is not itself Markdown."""
    answer_class, parser = _answer_class()
    answer = answer_class("", code_theme="ansi_dark", hyperlinks=False)
    answer.parsed = parser.parse(source)
    for token in answer.parsed:
        for child in token.children or ():
            if child.type == "softbreak":  # a model means its line ends
                child.type = "hardbreak"
    return answer


@functools.cache
def _answer_class() -> tuple[Any, Any]:
    from markdown_it import MarkdownIt
    from rich.markdown import Heading, Markdown

    class PlainHeading(Heading):
        """A heading at the left, without a frame."""

        def __rich_console__(self, console: Any, options: Any) -> Any:
            yield self.text

    class Answer(Markdown):
        """Markdown of a model: no HTML, no links that hide where they lead."""

        elements = {**Markdown.elements, "heading_open": PlainHeading}  # noqa: RUF012

    # What is disabled would make text vanish or change it.
    parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
    parser.disable(["html_block", "html_inline", "reference", "image", "entity", "escape"])
    return Answer, parser
