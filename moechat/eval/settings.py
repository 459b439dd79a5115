"""What ``moechat eval`` can be told, and what of it makes sense. Values are command-line texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moechat.errors import Usage
from moechat.eval.needle import ANSWER_TOKENS, MIN_LENGTH_TOKENS
from moechat.eval.policies import POLICIES

DEFAULT_LENGTHS = (700, 1400, 2700, 3400)
RANGES = {
    "window": (16, 1 << 24),
    "windows": (1, 1_000_000),
    "scored": (1, 1 << 20),
    "depths": (0, 999),
    "lengths": (MIN_LENGTH_TOKENS, 1 << 24),
    "seed": (0, 2**63 - 1),
    "threads": (1, 256),
}
_MAX_NUMBERS = 64  # in a list


@dataclass(frozen=True, slots=True)
class NeedleSettings:
    """Which needles: places in texts of which lengths. ``lengths`` None: the default ones."""

    lengths: tuple[int, ...] | None
    depths: int
    seed: int

    @classmethod
    def from_texts(cls, lengths: str | None, depths: str, seed: str) -> NeedleSettings:
        """From what stands on a command line. Raises Usage."""
        return cls(
            None if lengths is None else _numbers("lengths", lengths),
            number("depths", depths),
            number("seed", seed),
        )

    def lengths_within(self, context_tokens: int) -> tuple[int, ...]:
        """Those to measure with a model. Raises Usage when one that was asked for does not fit."""
        longest = context_tokens - ANSWER_TOKENS
        if self.lengths is None:
            fitting = tuple(n for n in DEFAULT_LENGTHS if n <= longest)
            return fitting or (max(longest, MIN_LENGTH_TOKENS),)
        for length in self.lengths:
            if length > longest:
                raise Usage(
                    f"--lengths cannot be {length:,}",
                    f"the context has {context_tokens:,} tokens, and the answer needs "
                    f"{ANSWER_TOKENS} of them",
                )
        return self.lengths


def policy_names(text: str) -> tuple[str, ...]:
    """Of --policies. Raises Usage."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in POLICIES:
            raise Usage(
                f"--policies cannot be {name[:40]!a}", f"it is a list of {', '.join(POLICIES)}"
            )
    return names


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
                f"--budgets cannot be {text[:40]!a}", "it is a list of numbers above 0, up to 1"
            )
        values.append(value)
    return tuple(dict.fromkeys(values))


def number(option: str, text: str) -> int:
    """A whole number within the option's range. Raises Usage."""
    low, high = RANGES[option]
    digits = text.strip()
    if digits.isascii() and digits.isdecimal() and len(digits) <= 19 and low <= int(digits) <= high:
        return int(digits)
    raise Usage(
        f"--{option} cannot be {text[:40]!a}", f"it is a whole number from {low} to {high}"
    )


def check_window(window_tokens: int, scored_tokens: int, context_tokens: int) -> None:
    """Raise Usage unless something crosses before what is scored, and all of it fits."""
    if not scored_tokens < window_tokens:
        raise Usage(
            f"--scored cannot be {scored_tokens:,}", f"a window has {window_tokens:,} tokens"
        )
    if window_tokens > context_tokens:
        raise Usage(
            f"--window cannot be {window_tokens:,}", f"the context has {context_tokens:,} tokens"
        )


def _numbers(option: str, text: str) -> tuple[int, ...]:
    items: Sequence[str] = text.split(",")
    if len(items) > _MAX_NUMBERS:
        raise Usage(f"--{option} has too many numbers", f"{_MAX_NUMBERS} are enough")
    return tuple(dict.fromkeys(number(option, item) for item in items))
