"""Keeps message text apart from what the template writes, through the rendering.

Private characters that the messages do not contain mark what must not be encoded as it stands:
the spelling of a control token in message text, and the place of an answer whose ids are known.
Templates see the text itself, so that their trimming, splitting and searching still work.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from moechat.errors import Usage
from moechat.text.control_tokens import ControlTokens
from moechat.text.tokenizer import check_encodable

# The first range keeps strings at two bytes a character.
PRIVATE_RANGES = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


@dataclass(frozen=True)
class Generated:
    """Stands for text that the model generated as ``ids``."""

    ids: tuple[int, ...]


@dataclass(frozen=True)
class Literal:
    """The spelling of a control token that came from message text."""

    text: str


@dataclass(frozen=True)
class Marker:
    """A control token that belongs where it stands, as the template's own do."""

    text: str


@dataclass(frozen=True)
class Joined:
    """Values one after the other in one string.

    Where the template takes the string as it is, ``whole`` stands for it instead.
    """

    values: tuple[str | Marker | Generated, ...]
    whole: Generated | None = None


Piece = str | Literal | Generated  # str: what the template wrote, and ordinary message text


class TextGuard:
    """Marks the values given to one rendering and takes the rendered prompt apart again."""

    def __init__(self, values: Any, control: ControlTokens) -> None:
        """``values``: everything that will be marked. Raises InvalidUtf8."""
        self._control = control
        self._generated: list[Generated] = []
        self._wholes: dict[str, str] = {}  # joined strings that may be replaced
        used: set[str] = set()
        for text in _strings(values):
            check_encodable(text)
            if not text.isascii():
                used.update(text)
        unused = (mark for mark in map(chr, chain(*PRIVATE_RANGES)) if mark not in used)
        marks = list(islice(unused, 5))
        if len(marks) < 5:
            raise Usage("the text cannot be used", "it contains every private character of Unicode")
        self._open, self._close, self._seam, self._ids_open, self._ids_close = marks
        self._any_mark = re.compile(f"[{''.join(marks)}]")
        self._marked = re.compile(
            f"{self._open}({control.pattern.pattern}){self._close}"
            f"|{self._ids_open}([0-9]+){self._ids_close}|[{''.join(marks)}]"
        )

    def mark(self, value: Any) -> Any:
        """A copy of strings, lists and dicts (keys too) that is safe to render."""
        if isinstance(value, str):
            marked = self._control.pattern.sub(f"{self._open}\\g<0>{self._close}", value)
            marked += self._seam if self._control.ends_within(value) else ""
            return marked if marked == value else _Marked(marked, value)
        if isinstance(value, Generated):
            self._generated.append(value)
            return f"{self._ids_open}{len(self._generated) - 1}{self._ids_close}"
        if isinstance(value, Marker):
            return value.text
        if isinstance(value, Joined):
            joined = "".join(self.mark(below) for below in value.values)
            if value.whole is not None:
                self._wholes[joined] = self.mark(value.whole)
            return joined
        if isinstance(value, dict):
            return {self.mark(key): self.mark(below) for key, below in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.mark(below) for below in value]
        return value

    def without_marks(self, text: str) -> str:
        """Text for people."""
        return self._any_mark.sub("", text)

    def pieces(self, rendered: str) -> Iterator[Piece]:
        """The rendered prompt in pieces, to be encoded one by one; empty ones are left out."""
        for joined, whole in self._wholes.items():
            rendered = rendered.replace(joined, whole)
        rendered, end = self._close_seams(rendered), 0
        for match in self._marked.finditer(rendered):
            if end < match.start():
                yield rendered[end : match.start()]
            if match[1] is not None:
                yield Literal(match[1])
            elif match[2] is not None:
                yield self._generated[int(match[2])]
            end = match.end()  # a mark whose partner the template dropped still parts the text
        if end < len(rendered):
            yield rendered[end:]

    def _close_seams(self, rendered: str) -> str:
        """Keep only the seams at which two pieces of text would make up a control token."""
        parts = rendered.split(self._seam)
        if len(parts) == 1:
            return rendered
        whole = "".join(parts)
        spans = [match.span() for match in self._control.pattern.finditer(whole)]
        kept, position, span = [parts[0]], len(parts[0]), 0
        for part in parts[1:]:
            while span < len(spans) and spans[span][1] <= position:
                span += 1
            if span < len(spans) and spans[span][0] < position:
                kept.append(self._seam)
            kept.append(part)
            position += len(part)
        return "".join(kept)


class _Marked(str):
    """A marked string that templates search as if it had no marks, across control tokens too."""

    def __new__(cls, marked: str, text: str) -> _Marked:
        string = super().__new__(cls, marked)
        string._text = text
        return string

    _text: str

    def __contains__(self, part: object) -> bool:
        return isinstance(part, str) and part in self._text


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for pair in value.items():
            yield from _strings(pair)
    elif isinstance(value, Joined):
        yield from _strings(value.values)
    elif isinstance(value, (list, tuple)):
        for below in value:
            yield from _strings(below)
