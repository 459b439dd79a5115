"""What ``moechat eval`` can be told, and what of it makes sense. Values are command-line texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from moechat.errors import Usage
from moechat.eval.needle import ANSWER_TOKENS, MIN_LENGTH_TOKENS

DEFAULT_LENGTHS = (700, 1400, 2700, 3400)
RANGES = {
    "window": (16, 1 << 24),
    "windows": (1, 1_000_000),
    "limit": (1, 1_000_000),
    "scored": (1, 1 << 20),
    "depths": (0, 999),
    "lengths": (MIN_LENGTH_TOKENS, 1 << 24),
    "seed": (0, 2**63 - 1),
    "threads": (1, 256),
}
_MAX_NUMBERS = 64  # in a list
_Item = TypeVar("_Item", int, float, str)


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedleSettings:
    """Which needles: so many places in texts of which lengths, made of what.

    ``lengths`` None: the default ones. ``filler`` None: the sentences of the program.
    """

    lengths: tuple[int, ...] | None = None
    depths: int = 19
    filler: Path | None = None
    seed: int = 0

    @classmethod
    def from_texts(
        cls, lengths: str | None, depths: str, filler: Path | None, seed: str, least_depths: int = 0
    ) -> NeedleSettings:
        """From what stands on a command line. Raises Usage."""
        return cls(
            lengths=None if lengths is None else _numbers("lengths", lengths),
            depths=number("depths", depths, least_depths),
            filler=filler,
            seed=number("seed", seed),
        )

    def lengths_within(self, context_tokens: int) -> tuple[int, ...]:
        """Those to measure with a model. Raises Usage when one that was asked for does not fit."""
        longest = context_tokens - ANSWER_TOKENS
        if self.lengths is None and longest >= MIN_LENGTH_TOKENS:
            return tuple(n for n in DEFAULT_LENGTHS if n <= longest) or (longest,)
        for length in self.lengths or (MIN_LENGTH_TOKENS,):
            if length > longest:
                raise Usage(
                    f"--lengths cannot be {length:,}",
                    f"the context has {context_tokens:,} tokens, and the answer needs "
                    f"{ANSWER_TOKENS} of them",
                )
        return self.lengths or ()

    def keys(self) -> dict[str, Any]:
        """For a report."""
        filler = None if self.filler is None else str(self.filler)
        return {"depths": self.depths, "filler": filler, "seed": self.seed}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringSettings:
    """Which text perplexity is measured on, and how: so many windows at most. No ``text``: none.

    Raises Usage when nothing would cross before what is scored.
    """

    text: Path | None = None
    window_tokens: int = 2000
    scored_tokens: int = 500
    windows: int = 20

    def __post_init__(self) -> None:
        if self.scored_tokens >= self.window_tokens:
            raise Usage(
                f"--scored cannot be {self.scored_tokens:,}",
                f"a window has {self.window_tokens:,} tokens",
            )

    @classmethod
    def from_texts(
        cls, text: Path | None, window: str, scored: str, windows: str
    ) -> ScoringSettings:
        """From what stands on a command line. Raises Usage."""
        return cls(
            text=text,
            window_tokens=number("window", window),
            scored_tokens=number("scored", scored),
            windows=number("windows", windows),
        )

    def window_within(self, context_tokens: int) -> int:
        """Tokens of a window. Raises Usage when a model has no room for them."""
        if self.window_tokens > context_tokens:
            raise Usage(
                f"--window cannot be {self.window_tokens:,}",
                f"the context has {context_tokens:,} tokens",
            )
        return self.window_tokens

    def keys(self) -> dict[str, Any]:
        """For a report."""
        return {
            "text": None if self.text is None else str(self.text),
            "window_tokens": self.window_tokens,
            "scored_tokens": self.scored_tokens,
        }


def names_in(text: str) -> tuple[str, ...]:
    """Of --policies, a list with commas. Raises Usage for a name that stands there twice."""
    return _different("policies", text, [name.strip() for name in text.split(",")])


def budget_fractions(text: str) -> tuple[float, ...]:
    """Of --budgets. Raises Usage."""
    values: list[float] = []
    for item in text.split(",")[: _MAX_NUMBERS + 1]:
        try:
            value = float(item)
        except ValueError:
            value = 0.0
        if not 0 < value <= 1 or len(values) == _MAX_NUMBERS:
            raise Usage(
                f"--budgets cannot be {text[:40]!a}",
                "it must be a list of numbers above 0, up to 1",
            )
        values.append(value)
    return _different("budgets", text, values)


def number(option: str, text: str, least: int = 0) -> int:
    """A whole number within the option's range, and not below ``least``. Raises Usage."""
    low, high = RANGES[option]
    low = max(low, least)
    digits = text.strip()
    if digits.isascii() and digits.isdecimal() and len(digits) <= 19 and low <= int(digits) <= high:
        return int(digits)
    raise Usage(
        f"--{option} cannot be {text[:40]!a}",
        f"it must be a whole number from {low:,} to {high:,}",
    )


def _numbers(option: str, text: str) -> tuple[int, ...]:
    items: Sequence[str] = text.split(",")
    if len(items) > _MAX_NUMBERS:
        raise Usage(f"--{option} has too many numbers", f"{_MAX_NUMBERS} are enough")
    return _different(option, text, [number(option, item) for item in items])


def _different(option: str, text: str, items: Sequence[_Item]) -> tuple[_Item, ...]:
    """Each once: what stands there twice was meant to be something else."""
    for place, item in enumerate(items):
        if item in items[:place]:
            raise Usage(f"--{option} cannot be {text[:40]!a}", f"{str(item)[:40]!a} is there twice")
    return tuple(items)
