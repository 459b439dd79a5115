"""Which GGUF files make the model that a user names."""

from __future__ import annotations

import os
import re
from pathlib import Path

from moechat.errors import CheckpointDamaged, ModelNotFound
from moechat.gguf_magic import is_gguf

_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def find_gguf(path: Path) -> list[Path] | None:
    """The files of the GGUF model at ``path``, parts in order; None when it is none.

    ``path`` is such a file, whatever part of a split one, or a folder that holds one model as GGUF
    and none as safetensors. Raises ModelNotFound for a folder with several models,
    CheckpointDamaged when parts are missing.
    """
    # os.path: unlike Path's own methods it says False of whatever can be no path.
    if os.path.isfile(path):
        return _with_other_parts(path) if is_gguf(path) else None
    try:
        names = sorted(os.listdir(path)) if os.path.isdir(path) else []
    except OSError:
        return None
    if any(name.endswith(".safetensors") for name in names):
        return None
    # A vision projector beside the model is not another model.
    names = [name for name in names if name.endswith(".gguf") and not name.startswith("mmproj")]
    models = {match["stem"] if (match := _PART.fullmatch(name)) else name: name for name in names}
    if len(models) > 1:
        raise ModelNotFound(
            f"{path} holds {len(models)} models",
            ", ".join(ascii(name)[1:-1] for name in list(models.values())[:5]),
            "Name one of these files",
        )
    return _with_other_parts(path / next(iter(models.values()))) if models else None


def _with_other_parts(path: Path) -> list[Path]:
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    files = [
        path.with_name(f"{match['stem']}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)
    ]
    missing = [file.name for file in files if not os.path.isfile(file)]
    if missing:
        raise CheckpointDamaged(
            f"{path.parent} is incomplete",
            f"{len(missing)} of {count} parts are missing: {', '.join(missing[:3])}",
            "Download them into that folder",
        )
    return files or [path]
