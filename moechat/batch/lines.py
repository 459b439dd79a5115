"""The two line formats of a batch: prompts coming in, JSON objects going out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, cast

from moechat.errors import InvalidUtf8, MoechatError, PromptEmpty
from moechat.json_file import parse_json_object
from moechat.messages import Role, Turn

LINE_LIMIT_BYTES = 16_000_000
_CHUNK_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"
_ROLES = ("system", "user", "assistant")
_NAME_KEYS = ("id", "custom_id")  # by which senders find their own lines again
_IGNORED_KEYS = {"metadata"}
# Valid raw inside a JSON string, but a terminal acts on the first group and line-based readers
# split at the second.
_RISKY = re.compile("[\x7f-\x9f\u2028\u2029]")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class BadLine(MoechatError):
    """A batch line that is neither a prompt nor valid JSON of the known keys."""

    name, exit_code = "bad-line", 2


def read_lines(stream: BinaryIO, limit_bytes: int = LINE_LIMIT_BYTES) -> Iterator[bytes | None]:
    """Each line as soon as it is complete, its line end removed.

    None stands for a line of more than ``limit_bytes``, which is skipped piece by piece.
    """
    first = True
    while line := stream.readline(limit_bytes + 1):
        if len(line) > limit_bytes and not line.endswith(b"\n"):
            while (rest := stream.readline(_CHUNK_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield None
        else:
            if first:
                line = line.removeprefix(_BOM)
            yield line.removesuffix(b"\n").removesuffix(b"\r")
        first = False


def parse_line(line: bytes | None, system: str = "") -> list[Turn] | None:
    """The conversation that a line asks to continue; None for a blank line.

    ``{`` opens a JSON object with ``prompt`` or ``messages`` and, if wanted, ``system``; ``"``
    opens a JSON string; all else is the prompt itself. ``system`` is the text for lines without
    their own. Raises BadLine, InvalidUtf8 or PromptEmpty.
    """
    content = decode_line(line)
    return None if content is None else turns_of(content, system)


def decode_line(line: bytes | None) -> str | dict[str, Any] | None:
    """What a line holds: the prompt, an object, or None for a blank one. BadLine, InvalidUtf8."""
    if line is None:
        raise BadLine(f"the line is longer than {LINE_LIMIT_BYTES:,} bytes")
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidUtf8(f"byte {error.start} of the line is not UTF-8", error.reason) from None
    start = text.lstrip()[:1]
    if not start:
        return None
    if start == "{":
        values: dict[str, Any] = _json(parse_json_object, line)
        return values
    return str(_json(json.loads, line)) if start == '"' else text


def names_of(content: str | dict[str, Any]) -> dict[str, str | int | None]:
    """The keys by which the sender knows the line, which its result repeats. Raises BadLine."""
    if isinstance(content, str):
        return {}
    names = {key: content[key] for key in _NAME_KEYS if key in content}
    for key, value in names.items():
        # What can be repeated exactly; a nested one could be too deep to write.
        if not isinstance(value, str | int | None):
            raise BadLine(f"{key} is neither a string nor a whole number")
    return names


def turns_of(content: str | dict[str, Any], system: str = "") -> list[Turn]:
    """The conversation that ``decode_line``'s content asks to continue. Raises as parse_line."""
    turns = [Turn("user", content)] if isinstance(content, str) else _turns_of_object(content)
    if system and turns[0].role != "system":
        turns.insert(0, Turn("system", system))
    _check(turns)
    return turns


def encode_result(result: Mapping[str, Any]) -> bytes:
    """One line of valid JSON in UTF-8, line feed included, whatever the strings hold."""
    text = _RISKY.sub(_escape, json.dumps(result, ensure_ascii=False))
    return _LONE_SURROGATE.sub("\ufffd", text).encode() + b"\n"


def _escape(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"


def _json(parse: Any, line: bytes) -> Any:
    try:
        return parse(line)
    except (ValueError, RecursionError) as error:  # JSONDecodeError is a ValueError
        hint = "A line that starts with { or a double quote is read as JSON"
        raise BadLine("the line is not valid JSON", str(error), hint) from None


def _turns_of_object(values: dict[str, Any]) -> list[Turn]:
    unknown = values.keys() - {"prompt", "messages", "system", *_NAME_KEYS} - _IGNORED_KEYS
    if unknown:
        names = ", ".join(ascii(key[:80]) for key in sorted(unknown)[:5])
        why = "a line has prompt or messages, and may have system"
        raise BadLine(f"the line has unknown keys: {names}", why, "Set parameters by flags")
    if ("prompt" in values) == ("messages" in values):
        raise BadLine("the line needs either prompt or messages")
    system = _string(values.get("system", ""), "system")
    if "prompt" in values:
        turns = [Turn("user", _string(values["prompt"], "prompt"))]
    else:
        turns = _turns_of_messages(values["messages"])
    if "system" in values:
        if turns[0].role == "system":
            raise BadLine("the line has both system and a system message")
        turns.insert(0, Turn("system", system))
    return turns


def _turns_of_messages(messages: Any) -> list[Turn]:
    if not isinstance(messages, list) or not messages:
        raise BadLine("messages is not a list with at least one message")
    turns: list[Turn] = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            raise BadLine(f"{where} is not an object of role and content")
        role = message["role"]
        if role not in _ROLES:
            raise BadLine(f"{where}.role is none of {', '.join(_ROLES)}")
        if role == "system" and number:
            raise BadLine(f"{where} is a system message, and only the first message may be one")
        turns.append(Turn(cast(Role, role), _string(message["content"], f"{where}.content")))
    if turns[-1].role != "user":
        raise BadLine("the last of messages is not the user's, so there is nothing to answer")
    return turns


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise BadLine(f"{where} is not a string")
    return value


def _check(turns: list[Turn]) -> None:
    for turn in turns:
        if _LONE_SURROGATE.search(turn.text):
            raise InvalidUtf8(f"the {turn.role} text holds half of a surrogate pair")
    if not turns[-1].text.strip():
        raise PromptEmpty("the prompt is empty")
