"""Token ids of one answer become text: whole characters, no control tokens, no stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moechat.errors import TextUnavailable

if TYPE_CHECKING:
    from moechat.engine.text import TextModel
    from moechat.text.answer_parts import Said


class Answer:
    """The text side of one generation. Without a text model every text is empty.

    ``prompt_ids`` tell whether the prompt itself has opened the thinking. Stop strings count in the
    answer proper, not in the thinking.
    """

    def __init__(
        self, text: TextModel | None, stops: tuple[str, ...], prompt_ids: Sequence[int] = ()
    ) -> None:
        if stops and text is None:
            raise TextUnavailable("stop strings need a tokenizer", "this model folder has none")
        from moechat.text.stop_strings import StopStrings

        self._splitter = text.reasoning.splitter(prompt_ids) if text else None
        self._stops = StopStrings(stops)
        self.stopped = False  # a stop string was completed
        self.reasoning = ""  # thinking that became certain with the last push or flush

    def push(self, token_id: int) -> str:
        """Answer text that became certain with this token; thinking goes to ``reasoning``."""
        if self._splitter is None:
            return ""
        return self._take(self._splitter.push(token_id))

    def flush(self) -> str:
        """Text that was held back, once the answer is over without a stop string."""
        if self._splitter is None or self.stopped:
            self.reasoning = ""
            return ""
        shown = self._take(self._splitter.flush())
        return shown if self.stopped else shown + self._stops.flush()

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of thinking so far."""
        return self._splitter.num_reasoning_tokens if self._splitter is not None else 0

    def _take(self, said: Said) -> str:
        self.reasoning = said.reasoning
        shown, self.stopped = self._stops.push(said.answer)
        return shown
