"""From models of a few layers to the whole one: time is linear in how many there are of each."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and greatest of some repetitions."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Fit:
    """Seconds of each part of a model, and of the whole one, over the rounds."""

    parts: dict[str, Spread]
    whole: Spread


def solve(
    counts: Sequence[Mapping[str, float]], seconds: Sequence[float]
) -> dict[str, float]:
    """Seconds of one of each part.

    ``counts[i]`` says how many of each part the model has that took ``seconds[i]``; there must be
    as many different models as parts.
    """
    parts = list(counts[0])
    matrix = np.array([[count[part] for part in parts] for count in counts], np.float64)
    solution, _, rank, _ = np.linalg.lstsq(matrix, np.array(seconds, np.float64), rcond=None)
    if rank < len(parts):
        raise ValueError("these models do not tell their parts apart")
    return dict(zip(parts, map(float, solution)))


def extrapolate(
    counts: Sequence[Mapping[str, float]],
    rounds: Sequence[Sequence[float]],
    whole: Mapping[str, float],
) -> Fit:
    """Each round is solved by itself, since the machine's speed changes between them.

    ``rounds[r][i]``: seconds of model i in round r. ``whole``: how many of each part all have.
    """
    solved = [solve(counts, seconds) for seconds in rounds]
    parts = {part: Spread.of([one[part] for one in solved]) for part in whole}
    totals = [sum(number * one[part] for part, number in whole.items()) for one in solved]
    return Fit(parts, Spread.of(totals))
