"""How messages write sizes and folders."""

from __future__ import annotations

import os
from pathlib import Path


def size_text(num_bytes: float) -> str:
    """In GB, or in MB below one of them."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.2f} MB"


def shown(path: Path) -> str:
    """A path as it is, or escaped where a terminal could take it for something else."""
    text = str(path)
    return text if text.isprintable() and len(text) < 500 else ascii(text[:500])


def cache_variable() -> str:
    """The environment variable that moves the cache folder, as things are."""
    return "MOECHAT_HOME" if os.environ.get("MOECHAT_HOME") else "XDG_CACHE_HOME"
