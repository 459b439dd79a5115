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
_NAMED_TOKENS = tuple(
    f"{name}_token" for name in ["bos", "eos", "unk", "sep", "pad", "cls", "mask"]
)


def read_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json; empty when there is none.

    Raises CheckpointDamaged, also for a named token that is no text.
    """
    path = folder / CONFIG_NAME
    config = read_json_object(path, _LIMIT_BYTES) if path.exists() else {}
    for name in _NAMED_TOKENS:
        value = _content(config.get(name))
        if value is not None and not isinstance(value, str):
            why = f"its {name} is neither text nor an object with such content"
            raise CheckpointDamaged(f"{path} cannot be used", why, "Download it again")
    return config


def read_template(folder: Path, config: Mapping[str, Any]) -> tuple[str, str]:
    """The template and the path of its file: its own file wins, as in transformers.

    Raises TextUnavailable when there is none, CheckpointDamaged.
    """
    path = folder / TEMPLATE_NAME
    if path.is_file():
        return _read_text(path), str(path)
    source = configured_template(config, str(folder / CONFIG_NAME))
    if source is not None:
        return source, str(folder / CONFIG_NAME)
    path = folder / _PROCESSOR_NAME
    if path.is_file():
        source = configured_template(read_json_object(path, _LIMIT_BYTES), str(path))
        if source is not None:
            return source, str(path)
    raise TextUnavailable(
        f"{folder} has no chat template",
        f"neither {TEMPLATE_NAME} nor {CONFIG_NAME} holds one",
        "Put the one of the model's chat version there, if it has one",
    )


def configured_template(config: Mapping[str, Any], origin: str) -> str | None:
    """``chat_template`` of a config: a string, or the one named "default" of several.

    ``origin`` names the config in messages. Raises CheckpointDamaged.
    """
    value = config.get("chat_template")
    if isinstance(value, list):
        defaults = [entry for entry in value if _is_default(entry)]
        value = defaults[-1].get("template") if defaults else None
    elif isinstance(value, dict):
        value = value.get("default")
    if value is None or isinstance(value, str):
        return value
    why = "its chat_template is no text"
    raise CheckpointDamaged(f"{origin} cannot be used", why, "Download it again")


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the like, which templates may use."""
    tokens = {name: _content(config.get(name)) for name in _NAMED_TOKENS}
    return {name: value for name, value in tokens.items() if isinstance(value, str)}


def _content(token: Any) -> Any:
    """The text of a token, which an object may hold; the object itself if it does not."""
    if isinstance(token, dict) and isinstance(token.get("content"), str):
        return token["content"]
    return token


def _is_default(entry: Any) -> bool:
    return isinstance(entry, dict) and entry.get("name") == "default"


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
