"""Keeps message text apart from what the template writes, through the rendering.

Private characters that the messages do not contain mark what must not be encoded as it stands:
the spelling of a control token in message text, and the place of an answer whose ids are known.
Seams mark where message text could make up a control token with what the template puts beside it.
Templates see the text itself: what its own methods make of it (trimming, splitting, cutting,
replacing, searching) is made of the text without marks and then marked again. Nothing is known of
text that a template joined with its own and then takes apart or rewrites, or that it passes through
a filter that rebuilds it character by character (title, wordwrap): such a template can still turn
message text into a control token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from moechat.errors import Usage
from moechat.text.control_tokens import ControlTokens
from moechat.text.tokenizer import check_encodable

_ROLES = frozenset(["system", "developer", "user", "assistant", "tool", "function", "ipython"])
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
        # A template may have cut one of the two marks off.
        spelled = control.pattern.pattern
        self._marked = re.compile(
            f"{self._open}({spelled}){self._close}?|({spelled}){self._close}"
            f"|{self._ids_open}([0-9]+){self._ids_close}|[{''.join(marks)}]"
        )

    def mark(self, value: Any) -> Any:
        """A copy of strings, lists and dicts (keys too) that is safe to render."""
        if isinstance(value, str):
            return _Marked(self._mark(value), value, self)
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
            return {self.mark(key): self._mark_field(key, below) for key, below in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.mark(below) for below in value]
        return value

    def _mark(self, text: str) -> str:
        marked = self._control.pattern.sub(f"{self._open}\\g<0>{self._close}", text)
        before = self._seam if self._control.begins_within(text) else ""
        return before + marked + (self._seam if self._control.ends_within(text) else "")

    def _mark_field(self, key: Any, value: Any) -> Any:
        # Templates build control tokens with the role: '<|' + message.role + '|>'.
        return value if key == "role" and value in _ROLES else self.mark(value)

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
            literal = match[1] or match[2]
            if literal is not None:
                yield Literal(literal)
            elif match[3] is not None:
                yield self._generated[int(match[3])]
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
    """A marked string that templates use as if it had no marks.

    Its methods work on the text; what comes of it is marked anew. Joining and printing take the
    marks along.
    """

    _text: str
    _guard: TextGuard

    def __new__(cls, marked: str, text: str, guard: TextGuard) -> _Marked:
        string = super().__new__(cls, marked)
        string._text, string._guard = text, guard
        return string

    def __str__(self) -> str:
        return self

    def __hash__(self) -> int:
        return hash(self._text)

    def __contains__(self, part: object) -> bool:
        return isinstance(part, str) and _bare(part) in self._text

    def __iter__(self) -> Iterator[str]:
        return (self._guard.mark(character) for character in self._text)


def _bare(value: Any) -> Any:
    return value._text if isinstance(value, _Marked) else value


def _on_text(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def call(self: _Marked, *args: Any, **named: Any) -> Any:
        result = method(self._text, *map(_bare, args), **named)
        return self if result is self._text else self._guard.mark(result)

    return call


for _name in (
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__len__", "__getitem__",
    "__mul__", "__rmul__", "capitalize", "casefold", "center", "count", "endswith", "expandtabs",
    "find", "index", "isalnum", "isalpha", "isdecimal", "isdigit", "islower", "isnumeric",
    "isspace", "isupper", "ljust", "lower", "lstrip", "partition", "removeprefix", "removesuffix",
    "replace", "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip", "split", "splitlines",
    "startswith", "strip", "swapcase", "title", "translate", "upper", "zfill",
):  # fmt: skip
    setattr(_Marked, _name, _on_text(_name))


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
