"""Tensor names in messages: the first few, and how many more."""

from __future__ import annotations

from collections.abc import Sequence

_LISTED = 3


def name_listing(label: str, names: Sequence[str]) -> str:
    """ "2 label: 'a', 'b'", or "" for none; names are escaped and shortened."""
    if not names:
        return ""
    shown = ", ".join(ascii(name[:120]) for name in names[:_LISTED])
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{len(names)} {label}: {shown}{more}"
