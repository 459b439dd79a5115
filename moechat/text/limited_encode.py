"""Pieces of a prompt become token ids; what cannot fit is refused without encoding it whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from moechat.errors import PromptTooLong
from moechat.text.tokenizer import Tokenizer

Pieces = Callable[[], Iterable["str | tuple[int, ...]"]]

# Texts up to here are encoded straight away: that takes milliseconds.
_SHORT_CHARACTERS = 65536
_PART_CHARACTERS = 16384
# Token counts beside a cut may differ from the whole text's; far less than this in practice.
_MARGIN_TOKENS = 64


def too_long(at_least_tokens: int, limit_tokens: int) -> PromptTooLong:
    """The error for a prompt of which only a lower bound is known."""
    return PromptTooLong(
        f"the prompt has at least {at_least_tokens} tokens; the limit is {limit_tokens}"
    )


def fewest_tokens(tokenizer: Tokenizer, text: str) -> int:
    """A lower bound of the tokens of ``text``, white space at its ends left out."""
    longest = tokenizer.longest_token_bytes
    # A character is at least one byte.
    return -(-len(text.strip()) // longest) if longest else 0


def encode_pieces(
    tokenizer: Tokenizer, pieces: Pieces, limit_tokens: int | None = None
) -> list[int]:
    """Ids of all pieces, each text encoded alone. Raises PromptTooLong early, as far as it can.

    Ids beyond ``limit_tokens`` are returned when they were found only by encoding everything.
    """
    if limit_tokens is not None:
        _check_fewest(tokenizer, pieces(), limit_tokens)
    ids: list[int] = []
    short: dict[str, list[int]] = {}  # control strings repeat
    for piece in pieces():
        if isinstance(piece, tuple):
            ids += piece
        elif len(piece) <= 64:
            if piece not in short:
                short[piece] = tokenizer.encode(piece)
            ids += short[piece]
        else:
            if limit_tokens is not None and len(piece) > _SHORT_CHARACTERS:
                _check_counted(tokenizer, piece, len(ids), limit_tokens)
            ids += tokenizer.encode(piece)
    return ids


def _check_fewest(
    tokenizer: Tokenizer, pieces: Iterable[str | tuple[int, ...]], limit_tokens: int
) -> None:
    fewest = 0
    for piece in pieces:
        fewest += len(piece) if isinstance(piece, tuple) else fewest_tokens(tokenizer, piece)
        if fewest > limit_tokens:
            raise too_long(fewest, limit_tokens)


def _check_counted(tokenizer: Tokenizer, text: str, before_tokens: int, limit_tokens: int) -> None:
    """Raise as soon as the parts of ``text`` have clearly more tokens than fit."""
    count = before_tokens
    for part in _parts(text):
        count += len(tokenizer.encode(part)) - _MARGIN_TOKENS
        if count > limit_tokens:
            raise too_long(count, limit_tokens)


def _parts(text: str) -> Iterator[str]:
    """``text`` in parts, cut before a space where there is one."""
    start = 0
    while start < len(text):
        end = start + _PART_CHARACTERS
        if end < len(text):
            space = text.rfind(" ", start + _PART_CHARACTERS // 2, end)
            end = space if space > 0 else end
        yield text[start:end]
        start = end
