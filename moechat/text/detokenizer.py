"""Token ids become text one by one, in whole characters."""

from __future__ import annotations

import codecs
import re

from moechat.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_MAX_WINDOW = 16  # ids that wait for the end of a character; it has at most four bytes


class Detokenizer:
    """The text of one answer. Every push costs the same, however long the answer is.

    Ids in ``hidden``, and special tokens unless ``skip_special`` is false, give no text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        hidden: frozenset[int] = frozenset(),
        skip_special: bool = True,
    ) -> None:
        self._hidden = hidden | tokenizer.special_ids if skip_special else hidden
        self._decoder: _ByteLevel | _ByteFallback | _Window
        if tokenizer.is_byte_level:
            self._decoder = _ByteLevel(tokenizer)
        elif tokenizer.byte_fallback is not None:
            self._decoder = _ByteFallback(tokenizer, tokenizer.byte_fallback.strips_first_space)
        else:
            self._decoder = _Window(tokenizer)

    def push(self, token_id: int) -> str:
        """The characters that this id completed; "" while one is incomplete."""
        return "" if token_id in self._hidden else self._decoder.push(token_id)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a cut character."""
        return self._decoder.flush()


class _ByteLevel:
    """Tokens are bytes in the GPT-2 alphabet: bytes that are printable stand for themselves."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = set(tokenizer.added_tokens.values())
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        token = self._tokenizer.token(token_id) or ""  # ids beyond the vocabulary have no text
        if token_id not in self._added:
            try:
                return self._utf8.decode(bytes([_BYTE_OF[character] for character in token]))
            except KeyError:  # not in that alphabet: the library, too, takes it as it is spelled
                pass
        return self._utf8.decode(token.encode())

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _ByteFallback:
    """Tokens are text with ``▁`` for a blank, or single bytes.

    Bytes that are no UTF-8 become one U+FFFD for each cut character, as everywhere in moechat; the
    library makes one of each byte.
    """

    def __init__(self, tokenizer: Tokenizer, strips_first_space: bool) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strips = strips_first_space

    def push(self, token_id: int) -> str:
        token = self._tokenizer.token(token_id) or ""  # ids beyond the vocabulary have no text
        byte = _BYTE_TOKEN.fullmatch(token)
        spelled = bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()
        return self._shown(self._utf8.decode(spelled))

    def flush(self) -> str:
        return self._shown(self._utf8.decode(b"", final=True))

    def _shown(self, text: str) -> str:
        if self._strips and text:
            self._strips = False
            return text.removeprefix(" ")
        return text


class _Window:
    """Any other decoder: the library decodes the last few ids, with and without the new ones."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # those shown last, then those not yet shown
        self._num_shown = 0

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids, skip_special=False)
        num_waiting = len(self._ids) - self._num_shown
        if text.endswith(_REPLACEMENT) and num_waiting < _MAX_WINDOW:
            return ""
        return self._show(text)

    def flush(self) -> str:
        return self._show(self._tokenizer.decode(self._ids, skip_special=False))

    def _show(self, text: str) -> str:
        before = self._tokenizer.decode(self._ids[: self._num_shown], skip_special=False)
        self._ids = self._ids[self._num_shown :]
        self._num_shown = len(self._ids)
        return text[len(before) :]


def _byte_of() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_of()
