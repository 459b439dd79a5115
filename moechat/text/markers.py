"""Markers that stand in a rendered prompt for what must not be encoded from its text.

Message text may contain control strings, or halves of them that a template would complete, and an
answer given before must keep its ids. Each becomes a marker with a random number that no text can
guess; after rendering the prompt is taken apart at markers and at the template's own tokens.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping

from moechat.text.added_tokens import AddedToken, any_of
from moechat.text.tokenizer import check_encodable

# Fields that templates compare as a whole; a break marker would change their meaning.
_NAMES = frozenset({"role", "type"})
_TEXTS = frozenset({"content", "text"})


class ControlStrings:
    """The added tokens of a model as search patterns. ``control``: those no text may forge."""

    def __init__(self, added: Mapping[str, AddedToken], control: Iterable[str]) -> None:
        self.added = added
        self.anywhere = any_of(added)
        self.forbidden = any_of(control)
        # Text that ends (begins) like this may become a token with what the template adds.
        self.heads = tuple({name[:n] for name in added for n in range(1, len(name))})
        self.tails = tuple({name[n:] for name in added for n in range(1, len(name))})
        self._all = "\n".join(added)
        self._longest = max(map(len, added), default=0)

    def holds(self, text: str) -> bool:
        """Whether ``text`` is part of a token, so that a template could make the rest."""
        return len(text) < self._longest and text in self._all


class Markers:
    """The markers of one prompt."""

    def __init__(self, strings: ControlStrings) -> None:
        self._strings = strings
        # Digits and signs only: case, escaping and trimming in a template leave them alone.
        self._nonce = f"@{secrets.randbelow(10**18):018d}."
        self._break = f"{self._nonce}@"
        self._pattern = re.compile(f"{re.escape(self._nonce)}([0-9]*)@")
        self._contents: list[str | tuple[int, ...]] = []
        self._markers: dict[str | tuple[int, ...], str] = {}

    def mark(self, content: str | tuple[int, ...]) -> str:
        """A marker for a control string that is plain text here, or for ids as they are."""
        marker = self._markers.get(content)
        if marker is None:
            marker = self._markers[content] = f"{self._nonce}{len(self._contents)}@"
            self._contents.append(content)
        return marker

    def protect(self, value: object, name: str = "") -> object:
        """``value`` (JSON-like) with every text in it made harmless. Raises InvalidUtf8."""
        if isinstance(value, str):
            return self._protect_text(value, name)
        if isinstance(value, Mapping):
            return {self.protect(k, "role"): self.protect(v, str(k)) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.protect(item) for item in value]
        return value

    def pieces(self, prompt: str) -> Iterator[str | tuple[int, ...]]:
        """The prompt in order: texts, each to be encoded alone and as plain text, and ids."""
        text: list[str] = []
        strip_next = False
        at = 0
        while at <= len(prompt):
            marker = self._pattern.search(prompt, at)
            end = marker.start() if marker else len(prompt)
            for part in self._at_tokens(prompt, at, end):
                if isinstance(part, str):
                    text.append(part.lstrip() if strip_next else part)
                    strip_next = strip_next and not part.strip()
                    continue
                joined = "".join(text)
                if joined := joined.rstrip() if part.strips_left else joined:
                    yield joined
                text, strip_next = [], part.strips_right
                yield (part.token_id,)
            if marker is None:
                break
            if index := marker[1]:
                if joined := "".join(text):
                    yield joined
                text, strip_next = [], False
                yield self._content(int(index))
            at = marker.end()
        if joined := "".join(text):
            yield joined

    def reveal(self, text: str) -> str:
        """``text`` with markers turned back, for an error message."""
        return self._pattern.sub(
            lambda m: str(self._content(int(m[1]))) if m[1] else "",
            text,
        )

    def _content(self, index: int) -> str | tuple[int, ...]:
        return self._contents[index] if index < len(self._contents) else ""

    def _at_tokens(self, prompt: str, start: int, end: int) -> Iterator[str | AddedToken]:
        for match in self._strings.anywhere.finditer(prompt, start, end):
            if start < match.start():
                yield prompt[start : match.start()]
            yield self._strings.added[match[0]]
            start = match.end()
        if start < end:
            yield prompt[start:end]

    def _protect_text(self, text: str, name: str) -> str:
        check_encodable(text)
        text = self._strings.forbidden.sub(lambda match: self.mark(match[0]), text)
        if name in _NAMES:
            return text
        # Templates trim white space, so that what is inside it may come to stand at the edge.
        body = text.strip()
        if not body:
            return text
        before, _, after = text.partition(body)
        inside = name in _TEXTS and self._strings.holds(body)
        if inside or body.endswith(self._strings.heads):
            body += self._break
        if inside or body.startswith(self._strings.tails):
            body = self._break + body
        text = before + body + after
        if after and text.endswith(self._strings.heads):
            text += self._break
        return self._break + text if before and text.startswith(self._strings.tails) else text
