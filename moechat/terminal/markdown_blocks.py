"""Splits Markdown that is still being written into blocks that cannot change any more."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})[ \t]*([^`\n]*)$")

# Inside a list or a quotation a fence is part of that block and no block of its own: only fences at
# the start of the line are looked at here.


@dataclass(frozen=True)
class Block:
    """Finished source. A "code" block is one line of a fenced listing in ``language``."""

    kind: Literal["text", "code"]
    source: str  # without its last newline
    language: str = ""
    gap_before: bool = False  # a blank line stood before it


class BlockSplitter:
    """Takes source in pieces; gives finished blocks. Work is linear in what was taken.

    ``tail`` is what was taken and is in no block yet.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []  # finished lines of the open text block
        self._partial = ""  # the line that has no newline yet
        self._fence = ""  # the marker that opened the listing we are in
        self._language = ""
        self._gap = False
        self._has_blank = False  # the open block's last line is blank

    @property
    def tail(self) -> Block:
        """The open block as far as it is known."""
        if self._fence:
            return Block("code", self._partial, self._language, self._gap)
        return Block("text", "\n".join([*self._lines, self._partial]), gap_before=self._gap)

    def push(self, text: str) -> list[Block]:
        """Take more source; the blocks that it finished."""
        blocks: list[Block] = []
        *lines, rest = text.split("\n")
        for line in lines:
            self._end_line(self._partial + line, blocks)
            self._partial = ""
        self._partial += rest
        if self._has_blank and self._partial and self._partial[0] not in " \t":
            self._close(blocks)  # what follows cannot belong to the block above the blank line
        return blocks

    def flush(self) -> list[Block]:
        """All that is left, at the end of the answer."""
        blocks: list[Block] = []
        if self._partial:
            self._end_line(self._partial, blocks)
            self._partial = ""
        self._close(blocks)
        self._fence = ""
        return blocks

    def cut(self, max_characters: int) -> Block:
        """Finish the front of an open block that became too long: at a line end, else at a blank.

        About ``max_characters``, at least one character of a tail that is not empty.
        """
        tail = self.tail
        front, at = tail.source[:max_characters], 0
        for mark in "\n ":
            at = at or front.rfind(mark) + 1 or tail.source.find(mark) + 1
        at = at or len(front)
        rest = tail.source[at:]
        if self._fence:
            self._partial = rest
        else:
            *self._lines, self._partial = rest.split("\n")
        self._gap = False
        return Block(tail.kind, tail.source[:at].rstrip("\n"), tail.language, tail.gap_before)

    def _end_line(self, line: str, blocks: list[Block]) -> None:
        if self._fence:
            if line.strip().startswith(self._fence) and not line.strip().strip(self._fence[0]):
                self._fence = ""
            else:
                blocks.append(Block("code", line, self._language, self._gap))
                self._gap = False
            return
        if not line.strip():
            self._has_blank = bool(self._lines)
            if self._lines:
                self._lines.append("")
            else:
                self._gap = True
            return
        if self._has_blank and line[0] not in " \t":
            self._close(blocks)
        self._has_blank = False
        fence = _FENCE.match(line)
        if fence:
            self._close(blocks)
            self._fence, self._language = fence[1], fence[2].strip()
        else:
            self._lines.append(line)

    def _close(self, blocks: list[Block]) -> None:
        source = "\n".join(self._lines)
        if source.strip():
            blocks.append(Block("text", source.rstrip("\n"), gap_before=self._gap))
            self._gap = self._has_blank
        self._lines, self._has_blank = [], False
