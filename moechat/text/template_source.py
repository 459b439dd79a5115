"""Where a chat template and its named tokens are written down: files of a folder, or a config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moechat.errors import CheckpointDamaged, TextUnavailable
from moechat.json_file import read_json_object

CONFIG_NAME, TEMPLATE_NAME = "tokenizer_config.json", "chat_template.jinja"
_PROCESSOR_NAME = "chat_template.json"  # where multimodal models of 2024 keep it
_LIMIT_BYTES = 16_000_000  # of any of these files
_NAMED_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def read_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json; empty when there is none. Raises CheckpointDamaged."""
    path = folder / CONFIG_NAME
    return read_json_object(path, _LIMIT_BYTES) if path.exists() else {}


def read_template(folder: Path, config: Mapping[str, Any]) -> tuple[str, str]:
    """The template and the path of its file: its own file wins, as in transformers.

    Raises TextUnavailable when there is none, CheckpointDamaged.
    """
    path = folder / TEMPLATE_NAME
    if path.is_file():
        return _read_text(path), str(path)
    source = configured_template(config)
    if source is not None:
        return source, str(folder / CONFIG_NAME)
    path = folder / _PROCESSOR_NAME
    source = configured_template(read_json_object(path, _LIMIT_BYTES)) if path.is_file() else None
    if source is not None:
        return source, str(path)
    raise TextUnavailable(
        f"{folder} has no chat template",
        f"neither {TEMPLATE_NAME} nor {CONFIG_NAME} holds one",
        "Put the one of the model's chat version there, if it has one",
    )


def configured_template(config: Mapping[str, Any]) -> str | None:
    """``chat_template`` of a config: a string, or the one named "default" of several."""
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry for entry in value if isinstance(entry, dict)}
        value = named.get("default", {}).get("template")
    elif isinstance(value, dict):
        value = value.get("default")
    return value if isinstance(value, str) else None


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the like, which templates may use."""
    tokens = {}
    for name in (f"{token}_token" for token in _NAMED_TOKENS):
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_LIMIT_BYTES + 1)
        if len(content) <= _LIMIT_BYTES:
            return content.decode("utf-8")
        why = f"it is larger than {_LIMIT_BYTES} bytes"
    except OSError as error:
        why = f"it cannot be read ({error.strerror})"
    except UnicodeDecodeError:
        why = "it is not UTF-8"
    raise CheckpointDamaged(f"{path} cannot be used", why, "Download it again")
