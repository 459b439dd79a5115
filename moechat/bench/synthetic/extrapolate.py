"""From models of a few layers to the whole one: time is linear in how many there are of each."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from moechat.bench.bursts import Burst, Spread


@dataclass(frozen=True, slots=True)
class Fit:
    """Seconds of each part of a model, and of the whole one, over the rounds."""

    parts: dict[str, Spread]
    whole: Spread


def solve(counts: Sequence[Mapping[str, float]], seconds: Sequence[float]) -> dict[str, float]:
    """Seconds of one of each part, none below 0: least squares of the relative errors.

    ``counts[i]`` says how many of each part the model has that took ``seconds[i]``. Raises
    ValueError when the models do not tell their parts apart.
    """
    parts = list(counts[0])
    # Of relative errors, since a shared machine makes all of them slower by some factor.
    rows = [[count[part] / took for part in parts] for count, took in zip(counts, seconds)]
    matrix = np.array(rows, np.float64)
    if np.linalg.matrix_rank(matrix) < len(parts):
        raise ValueError("these models do not tell their parts apart")
    solution = np.zeros(len(parts))
    used = list(range(len(parts)))
    while used:
        some = np.linalg.lstsq(matrix[:, used], np.ones(len(rows)), rcond=None)[0]
        if some.min() >= 0:
            solution[used] = some
            break
        # What noise makes negative is too small to be measured.
        used.pop(int(some.argmin()))
    return dict(zip(parts, map(float, solution)))


def extrapolate(
    counts: Sequence[Mapping[str, float]],
    rounds: Sequence[Sequence[float]],
    whole: Mapping[str, float],
) -> Fit:
    """The fit of each model's median; least and greatest are those of single rounds.

    ``rounds[r][i]``: seconds of model i in round r. ``whole``: how many of each part all have.
    """
    solved = [solve(counts, seconds) for seconds in rounds]
    middle = solve(counts, [statistics.median(times) for times in zip(*rounds, strict=True)])

    def spread(value: Callable[[dict[str, float]], float]) -> Spread:
        values = [value(one) for one in (middle, *solved)]
        return Spread(values[0], min(values), max(values))

    def total(one: dict[str, float]) -> float:
        return sum(number * one[part] for part, number in whole.items())

    return Fit({part: spread(itemgetter(part)) for part in whole}, spread(total))


def at_one_speed(parts: Sequence[Sequence[Burst]]) -> list[list[float]]:
    """Seconds a call by round and part, had memory been as fast as its median all the time.

    Decode waits for memory, whose speed on shared machines changes by a factor of two meanwhile.
    """
    usual = Spread.of([burst.read_bytes_per_second for bursts in parts for burst in bursts]).median
    return [
        [burst.seconds_per_call * burst.read_bytes_per_second / usual for burst in bursts]
        for bursts in zip(*parts, strict=True)
    ]
