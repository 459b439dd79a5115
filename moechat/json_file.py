"""JSON files of a model folder, which may turn out to be something else altogether."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from moechat.errors import CheckpointDamaged

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_HTML_STARTS = (b"<!doctype html", b"<html")


def foreign_content(head: bytes) -> str:
    """What a file that begins with ``head`` is instead of a model file; "" when unknown."""
    if head.startswith(_LFS_POINTER):
        return "it is a git-lfs pointer, not the file itself (run `git lfs pull` in its folder)"
    if head.lstrip().lower().startswith(_HTML_STARTS):
        return "it is an HTML page, probably an error page that was saved under the model's name"
    return ""


def parse_json_object(text: bytes) -> dict[str, Any]:
    """The JSON object in UTF-8 ``text``. ValueError: not JSON, no object, or a key given twice."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_without_repeats)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def read_json_object(path: Path, limit_bytes: int) -> dict[str, Any]:
    """The JSON object in a file of at most ``limit_bytes``. Raises CheckpointDamaged."""
    what = f"{path} cannot be used"
    # A pipe or a device under this name would block or never end.
    if not os.path.isfile(path):
        raise CheckpointDamaged(what, "it is missing or not a file", "Download it again")
    try:
        with path.open("rb") as file:
            text = file.read(limit_bytes + 1)
    except OSError as error:
        raise CheckpointDamaged(what, f"it cannot be read ({error.strerror})") from None
    if len(text) > limit_bytes:
        raise CheckpointDamaged(what, f"it is larger than {limit_bytes} bytes")
    try:
        return parse_json_object(text)
    except ValueError as error:
        why = foreign_content(text[:512]) or str(error)
        raise CheckpointDamaged(what, why, "Download it again") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object's pairs as a dict; readers differ in which of two equal keys they take."""
    values = dict(pairs)
    if len(values) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"it gives {twice[:120]!a} twice")
    return values
