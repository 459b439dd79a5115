"""Token ids of one answer become text: whole characters, no control tokens, no stop strings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moechat.errors import TextUnavailable

if TYPE_CHECKING:
    from moechat.engine.text import TextModel


class Answer:
    """The text side of one generation. Without a text model every text is empty."""

    def __init__(self, text: TextModel | None, stops: tuple[str, ...]) -> None:
        if stops and text is None:
            raise TextUnavailable("stop strings need a tokenizer", "this model folder has none")
        from moechat.text.detokenizer import Detokenizer
        from moechat.text.stop_strings import StopStrings

        self._detokenizer = (
            Detokenizer(text.tokenizer, hidden=text.template.control_ids) if text else None
        )
        self._stops = StopStrings(stops)
        self.stopped = False  # a stop string was completed

    def push(self, token_id: int) -> str:
        """Text that became certain with this token."""
        if self._detokenizer is None:
            return ""
        shown, self.stopped = self._stops.push(self._detokenizer.push(token_id))
        return shown

    def flush(self) -> str:
        """Text that was held back, once the answer is over without a stop string."""
        if self._detokenizer is None or self.stopped:
            return ""
        shown, self.stopped = self._stops.push(self._detokenizer.flush())
        return shown if self.stopped else shown + self._stops.flush()
