"""What perplexity is measured on: files of text or of chats, and windows of their tokens."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moechat.engine.text import TextModel
from moechat.errors import InvalidUtf8, MoechatError, Usage
from moechat.messages import Turn

LIMIT_BYTES = 64_000_000  # of a file, unpacked: far more than anybody waits for
_CHUNK_BYTES = 1 << 20

Conversation = list[Turn]


class FileMissing(MoechatError):
    """A file that was named cannot be read."""

    name, exit_code = "file-missing", 3


class FileUnreadable(MoechatError):
    """What was named is there, but no file, or not to be read."""

    name, exit_code = "file-unreadable", 3


@dataclass(frozen=True, slots=True)
class Source:
    """A file's content: a text, or conversations; the other one is empty."""

    text: str = ""
    conversations: tuple[Conversation, ...] = ()


def read_source(path: Path) -> Source:
    """A text file, or chats in .json: a list of conversations, each a list of [user, reply].

    Either may be packed, with .xz behind the name; a user's message may be null. Raises
    FileMissing, FileUnreadable, InvalidUtf8, and Usage for what is too long, empty, damaged or of
    another shape.
    """
    content = _read(path)
    try:
        text = content.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise InvalidUtf8(
            f"{_shown(path)} is not UTF-8",
            f"byte {content[error.start]:#04x} at offset {error.start}: {error.reason}",
        ) from None
    if path.name.removesuffix(".xz").endswith(".json"):
        return Source(conversations=_conversations(text, path))
    if not text.strip():
        raise Usage(f"{_shown(path)} is empty")
    return Source(text=text)


def windows(ids: list[int], lead: list[int], length: int, *, full: bool) -> list[list[int]]:
    """Consecutive windows of ``length`` + 1 ids: the last one is only predicted.

    Each begins with ``lead``. The id that a window only predicts is the first of the next one's
    own. ``full``: without a shorter one at the end.
    """
    own = length - len(lead)
    begins = range(0, len(ids) - (own if full else 1), own)
    return [lead + ids[begin : begin + own + 1] for begin in begins]


def leading_ids(text: TextModel) -> list[int]:
    """The token that every talk begins with, if the chat template writes one (<bos> and the like).

    Many models do badly without it. It is a control token that stands nowhere else in a talk of
    several turns; a token that begins each turn is none.
    """
    turns = [Turn("user", "a"), Turn("assistant", "b"), Turn("user", "c")]
    try:
        ids = text.template.encode(turns, add_generation_prompt=False)
    except MoechatError:  # a template that wants more than that
        return []
    is_lead = bool(ids) and ids[0] in text.template.control_ids and ids.count(ids[0]) == 1
    return ids[:1] if is_lead else []


def encode_conversations(source: Source, text: TextModel) -> Iterator[list[int]]:
    """Each conversation rendered whole by the model's template."""
    for turns in source.conversations:
        yield text.template.encode(turns, add_generation_prompt=False)


def encode_stream(source: Source, text: TextModel) -> tuple[list[int], list[int]]:
    """All tokens of a source in a row, and what windows of it begin with.

    Conversations follow each other as they do in training, each with its own first token.
    """
    if source.conversations:
        return [id_ for ids in encode_conversations(source, text) for id_ in ids], []
    return text.tokenizer.encode(source.text), leading_ids(text)


def _read(path: Path) -> bytes:
    try:
        content = bytearray()
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                content += chunk
                if len(content) > LIMIT_BYTES:
                    raise Usage(f"{_shown(path)} has more than {LIMIT_BYTES:,} bytes")
    except (lzma.LZMAError, EOFError) as error:
        raise Usage(f"{_shown(path)} cannot be unpacked", str(error)) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = getattr(error, "strerror", None) or str(error)
        absent = isinstance(error, (FileNotFoundError, NotADirectoryError, ValueError))
        kind = FileMissing if absent else FileUnreadable
        raise kind(f"{_shown(path)} cannot be read", why) from None
    return bytes(content)


def _conversations(text: str, path: Path) -> tuple[Conversation, ...]:
    try:
        content: Any = json.loads(text)
        found = tuple(_conversation(item) for item in content) if type(content) is list else ()
    except (ValueError, RecursionError) as error:
        why = str(error) or "it is nested too deeply"
        raise Usage(f"{_shown(path)} cannot be used as chats", why) from None
    if not found:
        raise Usage(f"{_shown(path)} holds no chats", "chats are a list of lists of [user, reply]")
    return found


def _conversation(pairs: Any) -> Conversation:
    turns: Conversation = []
    for pair in pairs if type(pairs) is list and pairs else [None]:
        if not (type(pair) is list and len(pair) == 2 and isinstance(pair[1], str)):
            raise ValueError("a chat is a list of [user, reply]")
        user, reply = pair
        if not isinstance(user, str | None):
            raise ValueError("a user's message is a text or null")
        if user is not None:
            turns.append(Turn("user", user))
        turns.append(Turn("assistant", reply))
    return turns


def _shown(path: Path) -> str:
    return f"{str(path)[:200]!a}"
