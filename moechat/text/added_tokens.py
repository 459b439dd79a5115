"""Added tokens: strings beside the ordinary vocabulary, and how they are found in text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A string outside the ordinary vocabulary that stands for one id.

    ``strips_left`` and ``strips_right``: white space beside it in the prompt belongs to it.
    """

    content: str
    token_id: int
    special: bool
    strips_left: bool = False
    strips_right: bool = False


def read_added_tokens(entries: object) -> dict[str, AddedToken]:
    """``added_tokens`` of tokenizer.json by content. ValueError: not what the format says."""
    if entries is None:
        return {}
    if not isinstance(entries, list):
        raise ValueError("added_tokens is not a list")
    added: dict[str, AddedToken] = {}
    for entry in entries:
        content = entry.get("content") if isinstance(entry, dict) else None
        token_id = entry.get("id") if isinstance(entry, dict) else None
        if not isinstance(content, str) or not content:
            raise ValueError("an added token has no content")
        if type(token_id) is not int or not 0 <= token_id < 1 << 31:
            raise ValueError(f"added token {content[:60]!a} has no valid id")
        added[content] = AddedToken(
            content,
            token_id,
            special=entry.get("special") is True,
            strips_left=entry.get("lstrip") is True,
            strips_right=entry.get("rstrip") is True,
        )
    return added


def any_of(contents: Iterable[str]) -> re.Pattern[str]:
    """Matches the longest of ``contents``; nothing when there is none.

    Shared beginnings are tried once: a plain alternation of hundreds of tokens would take
    microseconds at every `<` of a text.
    """
    trie: dict[str, Any] = {}
    names = set(contents)
    for content in names:
        node = trie
        for character in content:
            node = node.setdefault(character, {})
        node[""] = {}
    try:
        return re.compile(_trie_pattern(trie) if trie else "(?!)")
    except RecursionError:  # hundreds of tokens that each begin with the one before
        return re.compile("|".join(re.escape(name) for name in sorted(names, key=len)[::-1]))


def _trie_pattern(node: dict[str, Any]) -> str:
    prefix = ""
    while len(node) == 1 and "" not in node:
        ((character, node),) = node.items()
        prefix += re.escape(character)
    branches = [re.escape(key) + _trie_pattern(below) for key, below in node.items() if key]
    if not branches:
        return prefix
    return f"{prefix}(?:{'|'.join(branches)}){'?' if '' in node else ''}"
