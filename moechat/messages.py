"""What crosses a boundary: turns of a conversation, and the jobs that pass between threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation.

    ``ids`` holds an assistant turn as it was generated, end token excluded: such a turn is never
    encoded again from its text. A turn that came from outside has only ``text``.
    """

    role: Role
    text: str
    ids: tuple[int, ...] | None = None
