"""Token ids of one answer become text, whole characters only."""

from __future__ import annotations

import codecs

from moechat.text.tokenizer import Tokenizer

# A character has at most four bytes; after so many ids without an end the bytes are no UTF-8.
_WINDOW_IDS = 16


class Detokenizer:
    """Incremental decoding of one answer. Every push costs the same, however long it is.

    Special tokens and ids in ``hidden`` give no text.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden | tokenizer.special_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # Only for tokenizers that are not byte-level: ids whose text is known, then ids whose
        # text is not certain yet; the former are context for the latter.
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """All characters that this id completes; no U+FFFD before it is certain."""
        if token_id in self._hidden:
            return ""
        if self._tokenizer.byte_level:
            return self._utf8.decode(self._tokenizer.token_bytes(token_id))
        self._pending.append(token_id)
        text = self._pending_text()
        if text.endswith("\ufffd") and len(self._pending) < _WINDOW_IDS:
            return ""
        self._settle()
        return text

    def flush(self) -> str:
        """What remains when the answer ends: U+FFFD for half a character."""
        if self._tokenizer.byte_level:
            return self._utf8.decode(b"", final=True)
        text = self._pending_text()
        self._settle()
        return text

    def _pending_text(self) -> str:
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode([*self._context, *self._pending])[len(before) :]

    def _settle(self) -> None:
        if self._pending:
            self._context, self._pending = self._pending, []
