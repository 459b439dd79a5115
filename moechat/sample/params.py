"""What a caller may ask of the sampler."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from moechat.errors import BadParameter

MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn and when an answer ends. The defaults are neutral.

    Raises BadParameter (a ValueError) that names the parameter, its value and the allowed range.
    """

    temperature: float = 1.0  # 0 takes the most probable token
    top_k: int = 0  # keep this many most probable tokens; 0: all
    top_p: float = 1.0  # keep the fewest most probable tokens with this share
    min_p: float = 0.0  # keep tokens at least this probable, relative to the best
    repetition_penalty: float = 1.0  # CTRL's, for ids of prompt and answer
    presence_penalty: float = 0.0  # subtracted once from the logits of ids of the answer
    seed: int | None = None  # None: a new one for every answer
    stop: tuple[str, ...] = ()  # the answer ends before any of these; a bare string is one
    max_tokens: int | None = None  # sampled tokens, the end token included
    ignore_end: bool = False  # go on after the end token

    def __post_init__(self) -> None:
        _check_real("temperature", self.temperature, _real(self.temperature) >= 0, "0 or more")
        _check_integer("top_k", self.top_k, 0, 2**31 - 1, "0 (off) or more")
        _check_real("top_p", self.top_p, 0 < _real(self.top_p) <= 1, "above 0, at most 1")
        _check_real("min_p", self.min_p, 0 <= _real(self.min_p) <= 1, "0 to 1")
        _check_real(
            "repetition_penalty",
            self.repetition_penalty,
            _real(self.repetition_penalty) > 0,
            "above 0",
        )
        _check_real("presence_penalty", self.presence_penalty, True, "a finite number")
        if self.seed is not None:
            _check_integer("seed", self.seed, 0, MAX_SEED, "0 to 2^64-1")
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 1, 2**63 - 1, "1 or more")
        if not isinstance(self.ignore_end, bool):
            raise _bad("ignore_end", self.ignore_end, "true or false")
        # A string is a sequence of its characters: taken as such it would stop almost at once.
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, tuple | list) or not all(isinstance(s, str) and s for s in stop):
            raise _bad("stop", self.stop, "non-empty strings")
        object.__setattr__(self, "stop", tuple(stop))


def _bad(name: str, value: object, allowed: str) -> BadParameter:
    return BadParameter(f"{name} is {value!r}", f"allowed is {allowed}")


def _real(value: Any) -> float:
    """The value as a float; NaN, which no range contains, for what is not a finite number."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def _check_real(name: str, value: object, in_range: bool, allowed: str) -> None:
    if math.isnan(_real(value)) or not in_range:
        raise _bad(name, value, allowed)


def _check_integer(name: str, value: Any, low: int, high: int, allowed: str) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or not low <= int(value) <= high:
        raise _bad(name, value, allowed)
