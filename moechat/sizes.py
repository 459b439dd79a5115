"""How sizes are written for people."""

from __future__ import annotations


def size_text(num_bytes: float) -> str:
    """In decimal units, three digits: "31.7 MB". ``num_bytes`` is 0 or more."""
    size, unit = float(num_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            break
        size /= 1000
    return f"{size:.3g} {unit}" if size < 999.5 else f"{size:.0f} {unit}"
