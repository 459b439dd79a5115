"""Makes text from a model or a file harmless to a terminal."""

from __future__ import annotations

import re

# C0 but tab and newline, DEL, C1, line and paragraph separators, the bidirectional embeddings,
# overrides and isolates, and lone surrogates, which no stream can encode.
_HARMFUL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def neutralise(text: str) -> str:
    """``text`` with every control character replaced by one visible character.

    C0 and DEL become their control pictures (ESC is ``␛``), all others U+FFFD. The result is as
    long as ``text``; newline and tab stay.
    """
    return _HARMFUL.sub(_picture, text)


def one_line(text: str) -> str:
    """``text`` neutralised, with line breaks and tabs turned into blanks."""
    return neutralise(" ".join(text.split()))


def _picture(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else "�"
