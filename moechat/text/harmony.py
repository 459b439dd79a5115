"""gpt-oss' message format: an answer is several messages, each on a channel.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>

The final channel is the answer. All others are thinking: analysis, and what commentary holds, which
are calls of tools and remarks on them. (Format: openai/harmony, docs/format.md.)

A model may not keep to it. Text behind a message, before the next START, is answer unless a channel
or a body follows, which makes it a header whose START is missing; so is text without any marker. A
header that was cut short is no text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from moechat.messages import Parts
from moechat.text.answer_parts import Said, Section, Splitter
from moechat.text.detokenizer import Detokenizer

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
MARKERS = (START, CHANNEL, MESSAGE, END)
END_TOKENS = ("<|return|>", "<|call|>")  # END is none: the model goes on behind it
_ANSWER_CHANNEL = "final"


class Harmony(Splitter):
    """Follows the messages of one answer."""

    def __init__(
        self, detokenizer: Detokenizer, ids: Mapping[str, int], prompt_ids: Sequence[int]
    ) -> None:
        """``ids``: of MARKERS and END_TOKENS, as far as the tokenizer has them.

        ``prompt_ids`` tell where the answer begins: mostly in the header of a message.
        """
        super().__init__(detokenizer)
        self._marker_of = {token_id: marker for marker, token_id in ids.items()}
        self._state: Literal["loose", "header", "reasoning", "answer"] = "answer"
        self._channel: str | None = None  # None: its name has not begun
        self._loose = ""
        self._loose_ids: list[int] = []
        self._reasoning, self._answer = Section(), Section()
        self._reasoning_ids: list[int] = []
        self._answer_ids: list[int] = []
        self._has_marker = False
        begins = [at for at, token_id in enumerate(prompt_ids) if token_id == ids[START]]
        if begins:
            self._catch_up(prompt_ids[begins[-1] :])

    def _catch_up(self, message_ids: Sequence[int]) -> None:
        """Read the last message of the prompt, of which nothing belongs to the answer."""
        for token_id in message_ids:
            self.push(token_id)
        self._detokenizer.flush()
        if self._state == "header" and self._channel is None:
            self._state = "loose"
        self._has_marker = self._state != "loose"
        self._loose, self._loose_ids = "", []
        self._reasoning, self._answer = Section(), Section()
        self._reasoning_ids, self._answer_ids = [], []

    def push(self, token_id: int) -> Said:
        """Take the next token."""
        marker = self._marker_of.get(token_id)
        if marker is not None:
            return self._turn(marker)
        if self._state == "loose":
            self._loose_ids.append(token_id)
        elif self._state != "header":
            ids = self._answer_ids if self._state == "answer" else self._reasoning_ids
            ids.append(token_id)
        return self._take(self._detokenizer.push(token_id))

    def flush(self) -> Said:
        """What was held back, at the end."""
        said = self._take(self._detokenizer.flush())
        answer = self._settle_loose() if self._state == "loose" else said.answer
        return Said(answer + self._answer.flush(), said.reasoning)

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of thinking so far, markers not counted."""
        return len(self._reasoning_ids)

    def parts(self) -> Parts | None:
        """The tokens so far by what they are; None where nothing marks any as thinking."""
        if not self._has_marker:
            return None
        return Parts(tuple(self._reasoning_ids), tuple(self._answer_ids))

    def _turn(self, marker: str) -> Said:
        said = self._take(self._detokenizer.flush())
        if self._state == "loose" and marker not in (CHANNEL, MESSAGE):
            said = Said(self._settle_loose())
        self._loose, self._loose_ids, self._has_marker = "", [], True
        if marker == CHANNEL:
            self._state, self._channel = "header", ""
        elif marker == MESSAGE:
            name = (self._channel or _ANSWER_CHANNEL).split()[:1]
            is_answer = name == [_ANSWER_CHANNEL]
            self._state = "answer" if is_answer else "reasoning"
            (self._answer if is_answer else self._reasoning).part()
        else:
            self._state, self._channel = ("header" if marker == START else "loose"), None
        return said

    def _take(self, text: str) -> Said:
        """Text at the present place."""
        if self._state == "answer":
            return Said(self._answer.push(text))
        if self._state == "reasoning":
            return Said("", self._reasoning.push(text))
        if self._state == "loose":
            self._loose += text
        elif self._channel is not None:
            self._channel += text
        return Said()

    def _settle_loose(self) -> str:
        """Answer text that loose text turned out to be; blank text is none."""
        if not self._loose.strip():
            return ""
        self._answer.part()
        self._answer_ids += self._loose_ids
        return self._answer.push(self._loose)
