"""The recorded text sides of model families, and what the tree holds of their tokenizers."""

from __future__ import annotations

import json
import lzma
import shutil
from pathlib import Path
from typing import Any

CHAT = Path(__file__).parent / "fixtures" / "chat"


def recorded(name: str) -> dict[str, Any]:
    """Prompts, ids and streams of one family."""
    cases: dict[str, Any] = json.loads((CHAT / name / "chat.json").read_text(encoding="utf-8"))
    return cases


def unpack(name: str, folder: Path) -> Path:
    """Put what the fixtures hold of a family's text side into ``folder``."""
    for path in (CHAT / name).glob("*"):
        if path.suffix == ".xz":
            with lzma.open(path) as packed:
                (folder / path.stem).write_bytes(packed.read())
        else:
            shutil.copy(path, folder)
    return folder
