"""How sizes and durations are written for people."""

from __future__ import annotations


def size_text(num_bytes: float) -> str:
    """In decimal units, three digits: "31.7 MB". ``num_bytes`` is 0 or more."""
    size, unit = float(num_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            break
        size /= 1000
    return f"{size:.3g} {unit}" if size < 999.5 else f"{size:.0f} {unit}"


def duration_text(seconds: float) -> str:
    """In the unit that suits, two digits or so: "1.9 s", "19 s", "5 min", "2.4 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
