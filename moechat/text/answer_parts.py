"""What is common to all ways of dividing generated tokens into thinking and answer."""

from __future__ import annotations

from typing import NamedTuple

from moechat.messages import Parts
from moechat.text.detokenizer import Detokenizer


class Said(NamedTuple):
    """Text that became certain."""

    answer: str = ""
    reasoning: str = ""


class Splitter:
    """Follows one answer; this one takes all of it for the answer."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer

    def push(self, token_id: int) -> Said:
        """Take the next token."""
        return Said(self._detokenizer.push(token_id))

    def flush(self) -> Said:
        """What was held back, at the end."""
        return Said(self._detokenizer.flush())

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of thinking so far, markers not counted."""
        return 0

    def parts(self) -> Parts | None:
        """The tokens so far by what they are; None where nothing marks any as thinking."""
        return None


class Section:
    """Text less the newlines before it and, as long as nothing follows them, after it."""

    def __init__(self) -> None:
        self._begun = False
        self._held = ""

    def push(self, text: str) -> str:
        """Text that is now known to be inside."""
        text = self._held + text
        if not self._begun:
            text = text.lstrip("\n")
        kept = text.rstrip("\n")
        self._held = text[len(kept) :]
        self._begun = self._begun or bool(kept)
        return kept

    def part(self) -> None:
        """A blank line comes before what follows, if anything does."""
        self._held = "\n\n" if self._begun else ""

    def flush(self) -> str:
        """The newlines that were held back, for a section whose end they belong to."""
        held, self._held = self._held, ""
        return held
