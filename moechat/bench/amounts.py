"""How messages write figures and folders."""

from __future__ import annotations

import math
import os
from pathlib import Path


def shown(path: Path) -> str:
    """A path as it is, or escaped where a terminal could take it for something else."""
    text = str(path)
    return text if text.isprintable() and len(text) < 500 else ascii(text[:500])


def cache_variable() -> str:
    """The environment variable that moves the cache folder, as things are."""
    return "MOECHAT_HOME" if os.environ.get("MOECHAT_HOME") else "XDG_CACHE_HOME"


def figure(value: float, digits: int = 3) -> str:
    """So many significant digits, or all before the point; never with an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    decimals = max(digits - 1 - math.floor(math.log10(abs(value))), 0)
    text = f"{value:.{min(decimals, 9)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
