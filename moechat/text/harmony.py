"""gpt-oss' message format: an answer is several messages, each on a channel.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>

The final channel is the answer. All others are thinking: analysis, and what commentary holds, which
are calls of tools and remarks on them. (Format: openai/harmony, docs/format.md.)
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
        self._state: Literal["header", "reasoning", "answer"] = "answer"
        self._channel: str | None = None  # None: its name has not begun
        self._header = ""  # text before any message, shown if none comes
        self._reasoning, self._answer = Section(), Section()
        self._reasoning_ids: list[int] = []
        self._answer_ids: list[int] = []
        self._has_message = False
        begins = [at for at, token_id in enumerate(prompt_ids) if token_id == ids[START]]
        if begins:
            self._catch_up(prompt_ids[begins[-1] :])

    def _catch_up(self, message_ids: Sequence[int]) -> None:
        """Read the last message of the prompt, of which nothing belongs to the answer."""
        for token_id in message_ids:
            self.push(token_id)
        self._detokenizer.flush()
        self._header, self._has_message = "", self._state != "header"
        self._reasoning, self._answer = Section(), Section()
        self._reasoning_ids, self._answer_ids = [], []

    def push(self, token_id: int) -> Said:
        """Take the next token."""
        marker = self._marker_of.get(token_id)
        if marker is not None:
            return self._turn(marker)
        text = self._detokenizer.push(token_id)
        if self._state == "header":
            self._header += text
            if self._channel is not None:
                self._channel += text
            return Said()
        ids = self._answer_ids if self._state == "answer" else self._reasoning_ids
        ids.append(token_id)
        return self._body(text)

    def flush(self) -> Said:
        """What was held back, at the end."""
        said = self._body(self._detokenizer.flush())
        if not self._has_message:  # not the format at all: then it is an answer
            return Said(self._header + said.answer + self._answer.flush())
        return Said(said.answer + self._answer.flush(), said.reasoning)

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of thinking so far, markers not counted."""
        return len(self._reasoning_ids)

    def parts(self) -> Parts | None:
        """The tokens so far by what they are; None where nothing marks any as thinking."""
        if not self._has_message:
            return None
        return Parts(tuple(self._reasoning_ids), tuple(self._answer_ids))

    def _turn(self, marker: str) -> Said:
        said = self._body(self._detokenizer.flush())
        if marker == CHANNEL:
            self._state, self._channel = "header", ""
        elif marker == MESSAGE:
            name = (self._channel or _ANSWER_CHANNEL).split()[:1]
            is_answer = name == [_ANSWER_CHANNEL]
            self._state, self._has_message = ("answer" if is_answer else "reasoning"), True
            (self._answer if is_answer else self._reasoning).part()
        else:
            self._state, self._channel = "header", None
        return said

    def _body(self, text: str) -> Said:
        if self._state == "answer":
            return Said(self._answer.push(text))
        if self._state == "reasoning":
            return Said("", self._reasoning.push(text))
        self._header += text
        return Said()
