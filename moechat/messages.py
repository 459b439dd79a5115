"""What crosses a boundary: turns of a conversation, and the jobs that pass between threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class Parts:
    """Generated ids by what they are: thinking, then the answer. Markers are in neither.

    ``lead`` is answer text before ``answer_ids``: newlines, or the rest of a token that also ended
    the thinking. ``opening`` and ``closing`` spell the markers, as far as the ids hold them.
    ``is_closed``: the thinking came to its end.
    """

    reasoning_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    lead: str = ""
    opening: str = ""
    closing: str = ""
    is_closed: bool = True


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation.

    ``ids`` holds an assistant turn as it was generated, end token excluded: such a turn is never
    encoded again from its text. ``reasoning`` is what the model thought before ``text``, and
    ``parts`` tells the two apart in ``ids``. A turn that came from outside has only ``text``.
    """

    role: Role
    text: str
    ids: tuple[int, ...] | None = None
    reasoning: str = ""
    parts: Parts | None = None
