"""Refuses text that cannot fit without encoding all of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from moechat.errors import PromptTooLong
from moechat.text.control_tokens import ControlTokens
from moechat.text.text_guard import Generated, Literal, Piece
from moechat.text.tokenizer import Tokenizer

_CHUNK_CHARACTERS = 16_384
# Shorter prompts are encoded whole: that takes some tens of milliseconds and megabytes.
_SMALL_CHARACTERS = 65_536


def refuse_if_too_long(
    tokenizer: Tokenizer,
    control: ControlTokens,
    pieces: Iterable[Piece],
    num_characters: int,
    limit_tokens: int,
) -> None:
    """Raise PromptTooLong when ``pieces`` have surely more than ``limit_tokens`` tokens.

    A prompt that may fit passes, so that its exact length still has to be compared.
    ``num_characters``: of all pieces together, roughly.
    """
    is_small = num_characters <= max(_SMALL_CHARACTERS, 4 * limit_tokens)
    exact = counted = 0
    for piece in pieces:
        if isinstance(piece, Generated):
            exact += len(piece.ids)
        elif isinstance(piece, Literal):
            exact += control.length_as_text(piece.text)
        elif not is_small:
            for chunk in _chunks(piece):
                counted += len(tokenizer.encode_with_added_tokens(chunk))
                if exact + _least(counted) > limit_tokens:
                    break
        least = exact + _least(counted)
        if least > limit_tokens:
            if isinstance(piece, str) and tokenizer.longest_token_bytes is not None:
                # Characters are at least a byte each: weaker, but from all of this piece.
                least = max(least, exact + len(piece) // tokenizer.longest_token_bytes)
            raise PromptTooLong(
                f"the prompt has at least {least} tokens; the limit is {limit_tokens}"
            )


def _least(counted: int) -> int:
    """A cut can add a token or two to its chunk; an eighth is far more than all of them."""
    return counted - counted // 8


def _chunks(text: str) -> Iterator[str]:
    """Text in chunks, cut before a space where there is one."""
    start = 0
    while start < len(text):
        end = start + _CHUNK_CHARACTERS
        if end < len(text):
            space = text.rfind(" ", start + _CHUNK_CHARACTERS // 2, end)
            end = space if space > 0 else end
        yield text[start:end]
        start = end
