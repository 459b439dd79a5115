"""Which added tokens steer the model, and where their spelling occurs in text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from moechat.text.think_tags import KNOWN_TAGS
from moechat.text.tokenizer import Tokenizer

# `<|name|>` with either bar. Templates also build such tokens from pieces, so that looking for the
# whole spelling in the template does not find them all.
_BRACKETED = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)


class ControlTokens:
    """The control tokens of a tokenizer and a template.

    A control token is flagged special, or its spelling is in the template, or it looks like one, or
    it marks thinking.
    Other added tokens (runs of spaces, HTML tags in some vocabularies) are ordinary text.
    """

    def __init__(self, tokenizer: Tokenizer, template_source: str) -> None:
        self._tokenizer = tokenizer
        self._by_content = {
            content: token_id
            for content, token_id in tokenizer.added_tokens.items()
            if content
            and (
                token_id in tokenizer.special_ids
                or _BRACKETED.fullmatch(content)
                or any(content in tags for tags in KNOWN_TAGS)
                or (content in template_source and not _is_words(content))
            )
        }
        self.ids = frozenset(self._by_content.values())
        self.pattern = re.compile(_any_of(self._by_content))
        self._lengths: dict[str, int] = {}
        self._heads = {content[:end] for content in self._by_content for end in range(len(content))}
        self._longest_head = max(map(len, self._heads), default=0)
        self._tails = "\0".join(["", *(content[1:] for content in self._by_content), ""])

    def ends_within(self, text: str) -> bool:
        """Whether text that follows could complete a control token that begins in ``text``."""
        longest = min(self._longest_head, len(text))
        return any(text[-length:] in self._heads for length in range(1, longest + 1))

    def begins_within(self, text: str) -> bool:
        """Whether ``text`` could complete a control token, or be the middle of one."""
        if not text or text[0] not in self._tails:
            return False
        longest = min(self._longest_head, len(text))
        is_end = any(f"{text[:length]}\0" in self._tails for length in range(1, longest + 1))
        return is_end or (len(text) < self._longest_head and text in self._tails)

    def encode(self, text: str) -> list[int]:
        """Ids of text in which the spelling of a control token means that token."""
        ids = self._tokenizer.encode_with_added_tokens(text)
        spelled = [self._by_content[content] for content in self.pattern.findall(text)]
        if [id_ for id_ in ids if id_ in self.ids] == spelled:
            return ids
        # The library saw another one, for example only after normalising the text.
        ids, end = [], 0
        for match in self.pattern.finditer(text):
            ids += [*self.encode_as_text(text[end : match.start()]), self._by_content[match[0]]]
            end = match.end()
        return ids + self.encode_as_text(text[end:])

    def encode_as_text(self, text: str) -> list[int]:
        """Ids of text in which the spelling of a control token is text like any other."""
        ids = self._tokenizer.encode(text)
        if self.ids.isdisjoint(ids):
            return ids
        # Some models' vocabularies hold the spelling itself: no more than a character at a time.
        ids = [id_ for character in text for id_ in self._tokenizer.encode(character)]
        return [id_ for id_ in ids if id_ not in self.ids]

    def length_as_text(self, content: str) -> int:
        """Tokens that the spelling of one control token takes as text."""
        if content not in self._lengths:
            self._lengths[content] = len(self.encode_as_text(content))
        return self._lengths[content]


def _is_words(content: str) -> bool:
    return all(character.isalnum() or character.isspace() for character in content)


def _any_of(contents: Iterable[str]) -> str:
    """A pattern for the longest of the strings that occurs; shared beginnings are tried once.

    A plain alternation of hundreds of tokens would take microseconds at every `<` of a text.
    """
    trie: dict[str, Any] = {}
    for content in contents:
        node = trie
        for character in content:
            node = node.setdefault(character, {})
        node[""] = {}
    return _trie_pattern(trie) if trie else "(?!)"


def _trie_pattern(node: dict[str, Any]) -> str:
    prefix = ""
    while len(node) == 1 and "" not in node:
        ((character, node),) = node.items()
        prefix += re.escape(character)
    branches = [re.escape(key) + _trie_pattern(below) for key, below in node.items() if key]
    if not branches:
        return prefix
    return f"{prefix}(?:{'|'.join(branches)}){'?' if '' in node else ''}"
