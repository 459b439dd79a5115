"""What tells a GGUF file from others, without reading it."""

from __future__ import annotations

import os

MAGIC = b"GGUF"


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """By name, so that a damaged one is called so later, or by its first bytes."""
    if os.fspath(path).endswith(".gguf"):
        return True
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False
