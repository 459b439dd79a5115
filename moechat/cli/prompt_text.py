"""The text of a question: from the command line, from standard input and from files."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from moechat.errors import InvalidUtf8, MoechatError, PromptEmpty, PromptTooLong, Usage

TEXT_LIMIT_BYTES = 64_000_000  # far above any context; an endless stream must not fill memory
_CHUNK_BYTES = 1 << 20
_PATIENCE_SECONDS = 2.0


class FileMissing(MoechatError):
    """A file that a flag names cannot be read."""

    name, exit_code = "file-missing", 3


def compose_prompt(piped: str | None, argument: str | None) -> str:
    """Piped text less one trailing line feed, a blank line, then the argument.

    Data comes before the question so that questions about the same data share a prefix. Raises
    PromptEmpty when nothing is left.
    """
    parts = [] if piped is None else [piped.removesuffix("\n")]
    if argument is not None:
        parts.append(argument)
    prompt = "\n\n".join(part for part in parts if part.strip())
    if not prompt:
        raise PromptEmpty("the prompt is empty", next_step='Ask something: `moechat run mini "…"`')
    return prompt


def check_argument(text: str, name: str) -> str:
    """A command-line argument as text. Raises InvalidUtf8 with the byte where it stops being it."""
    try:
        return decode(os.fsencode(text), name)
    except UnicodeEncodeError:  # a locale whose bytes cannot be restored
        raise InvalidUtf8(f"{name} is not valid text") from None


def decode(content: bytes, name: str) -> str:
    """UTF-8 as text: a byte order mark is dropped, CRLF becomes LF. Raises InvalidUtf8."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidUtf8(
            f"{name} is not UTF-8",
            f"byte {content[error.start]:#04x} at offset {error.start}: {error.reason}",
            "Convert it first, for example with iconv",
        ) from None
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def read_piped(stream: BinaryIO | None, while_waiting: Callable[[], None] | None = None) -> str:
    """All of standard input; "" when it is closed. ``while_waiting`` is called when it is slow.

    Raises PromptTooLong above TEXT_LIMIT_BYTES, InvalidUtf8, or Usage when it cannot be read.
    """
    if stream is None:
        return ""
    try:
        if while_waiting is not None and not select.select([stream], [], [], _PATIENCE_SECONDS)[0]:
            while_waiting()
        content = _read_bounded(stream, "standard input")
    except OSError as error:
        raise Usage("standard input cannot be read", error.strerror or str(error)) from None
    return decode(content, "standard input")


def read_text_file(path: Path, flag: str) -> str:
    """A file that ``flag`` names. Raises FileMissing, PromptTooLong or InvalidUtf8."""
    try:
        with path.open("rb") as file:
            content = _read_bounded(file, str(path))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = getattr(error, "strerror", None) or str(error)
        raise FileMissing(f"{flag}: {str(path)!a} cannot be read", why) from None
    return decode(content, str(path))


def _read_bounded(stream: BinaryIO, name: str) -> bytes:
    content = bytearray()
    while chunk := stream.read(_CHUNK_BYTES):
        content += chunk
        if len(content) > TEXT_LIMIT_BYTES:
            raise PromptTooLong(
                f"{name} has more than {TEXT_LIMIT_BYTES:,} bytes",
                "no model can read that much at once",
            )
    return bytes(content)


def system_text(text: str | None, file: Path | None) -> str:
    """What --system or --system-file give; "" for neither. Raises Usage for both."""
    if text is not None and file is not None:
        raise Usage("--system and --system-file exclude each other")
    if file is not None:
        return read_text_file(file, "--system-file").removesuffix("\n")
    return check_argument(text, "--system") if text is not None else ""
