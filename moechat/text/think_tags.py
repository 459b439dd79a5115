"""Thinking between two tags at the start of an answer, as most reasoning models write it.

The thinking is whatever comes before the first closing tag, once: a later tag is text that the
model talks about, or noise, and divides nothing.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from moechat.messages import Parts
from moechat.text.answer_parts import Said, Section, Splitter
from moechat.text.detokenizer import Detokenizer


class Tags(NamedTuple):
    """The two markers as they are spelled."""

    opening: str
    closing: str


KNOWN_TAGS = (
    Tags("<think>", "</think>"),  # DeepSeek, Qwen, GLM, Kimi and most others
    Tags("[THINK]", "[/THINK]"),  # Magistral
    Tags("<seed:think>", "</seed:think>"),
    Tags("◁think▷", "◁/think▷"),  # Kimi-VL
)


class _Tagged(Splitter):
    """ "start": only blank text came; "plain": an answer without thinking."""

    def __init__(self, detokenizer: Detokenizer, tags: Tags, is_open: bool) -> None:
        """``is_open``: the prompt has opened the thinking already."""
        super().__init__(detokenizer)
        self._tags = tags
        self._state: Literal["start", "plain", "thinking", "answer"]
        self._state = "thinking" if is_open else "start"
        self._has_opening = False
        self._held = ""  # text of which is not known yet what it is
        self._reasoning, self._answer = Section(), Section()
        self._reasoning_tokens: list[tuple[int, int]] = []  # id, characters
        self._answer_ids: list[int] = []
        self._lead = ""

    def _take_answer(self, token_id: int, text: str) -> Said:
        """One token after the thinking."""
        if text and not text.strip("\n") and not self._answer_ids:
            self._lead += text
        else:
            self._answer_ids.append(token_id)
        return Said(self._answer.push(text))

    def flush(self) -> Said:
        """What was held back, at the end."""
        text = self._held + self._detokenizer.flush()
        self._held = ""
        if self._state == "thinking":
            return Said("", self._reasoning.push(text))
        if self._state == "answer":
            return Said(self._answer.push(text) + self._answer.flush())
        return Said(text)

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of thinking so far, markers not counted."""
        return len(self._reasoning_tokens)

    def parts(self) -> Parts | None:
        """The tokens so far by what they are; None where nothing marks any as thinking."""
        if self._state in ("start", "plain"):
            return None
        return Parts(
            tuple(token_id for token_id, _ in self._reasoning_tokens),
            tuple(self._answer_ids),
            self._lead,
            self._tags.opening if self._has_opening else "",
            self._tags.closing,
            self._state == "answer",
        )


class TokenTags(_Tagged):
    """Tags that are tokens of their own: their ids decide, never how text is spelled."""

    def __init__(
        self, detokenizer: Detokenizer, tags: Tags, tag_ids: tuple[int, int], is_open: bool
    ) -> None:
        super().__init__(detokenizer, tags, is_open)
        self._opening_id, self._closing_id = tag_ids

    def push(self, token_id: int) -> Said:
        """Take the next token."""
        if self._state == "start" and token_id == self._opening_id:
            self._state, self._has_opening, self._held = "thinking", True, ""
            return Said()
        if self._state == "thinking" and token_id == self._closing_id:
            self._state = "answer"
            return Said("", self._reasoning.push(self._detokenizer.flush()))
        text = self._detokenizer.push(token_id)
        if self._state == "thinking":
            self._reasoning_tokens.append((token_id, len(text)))
            return Said("", self._reasoning.push(text))
        if self._state == "answer":
            return self._take_answer(token_id, text)
        if self._state == "start":
            self._held += text
            if not self._held or self._held.isspace():
                return Said()
            self._state, text, self._held = "plain", self._held, ""
        return Said(text)


class TextTags(_Tagged):
    """Tags that the vocabulary spells with several ordinary tokens."""

    def push(self, token_id: int) -> Said:
        """Take the next token."""
        text = self._detokenizer.push(token_id)
        if self._state == "plain":
            return Said(text)
        if self._state == "answer":
            return self._take_answer(token_id, text)
        self._held += text
        if self._state == "start":
            return self._begin()
        self._reasoning_tokens.append((token_id, len(text)))
        return self._think()

    def _begin(self) -> Said:
        opening, begun = self._tags.opening, self._held.lstrip()
        if begun.startswith(opening):
            self._state, self._has_opening = "thinking", True
            self._held = begun[len(opening) :]
            return self._think()
        if opening.startswith(begun):
            return Said()
        self._state, text, self._held = "plain", self._held, ""
        return Said(text)

    def _think(self) -> Said:
        closing, text = self._tags.closing, self._held
        before, found, self._lead = text.partition(closing)
        if found:
            self._state, self._held = "answer", ""
            num_left = len(text) - len(before)  # characters whose tokens are not the thinking's
            while num_left > 0 and self._reasoning_tokens:
                num_left -= self._reasoning_tokens.pop()[1]
            return Said(self._answer.push(self._lead), self._reasoning.push(before))
        longest = min(len(closing) - 1, len(text))
        ends = (n for n in range(longest, 0, -1) if closing.startswith(text[-n:]))
        cut = len(text) - next(ends, 0)
        self._held = text[cut:]
        return Said("", self._reasoning.push(text[:cut]))
