"""Whether sessions step in one batch, or in two that take turns: whichever is faster here.

Two in turns hide the GPU's part of one under the CPU's experts of the other; one batch reads the
GPU's weights, and experts that its rows share, once. Which is faster depends on the machine and on
how many experts the CPU has, so both are tried. No bit of a row depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

TRIAL_STEPS, KEPT_STEPS = 12, 1024


@dataclass
class _Rate:
    steps: int = 0
    seconds: float = 0.0


@dataclass
class _Trial:
    """``rates`` by whether in turns; ``kept`` steps of the better one since both were tried."""

    rates: dict[bool, _Rate] = field(default_factory=lambda: {True: _Rate(), False: _Rate()})
    kept: int = 0

    @property
    def open(self) -> bool | None:
        """What is to be tried next; None once both were."""
        for turns, rate in self.rates.items():
            if rate.steps < TRIAL_STEPS:
                return turns
        return None


class LaneChoice:
    """By number of sessions. Used by the decode thread alone."""

    def __init__(self) -> None:
        self._trials: dict[int, _Trial] = {}

    def next(self, num_sessions: int) -> tuple[bool, int]:
        """(whether to take turns, for how many steps until this is asked again)."""
        trial = self._trials.setdefault(num_sessions, _Trial())
        if trial.open is not None:
            return trial.open, TRIAL_STEPS - trial.rates[trial.open].steps
        seconds = {turns: rate.seconds / rate.steps for turns, rate in trial.rates.items()}
        return seconds[True] <= seconds[False], KEPT_STEPS - trial.kept

    def took(self, num_sessions: int, turns: bool, steps: int, seconds: float) -> None:
        """So many steps of all sessions, begun and ended together, took so long."""
        trial = self._trials.setdefault(num_sessions, _Trial())
        if trial.open is not None:
            rate = trial.rates[turns]
            rate.steps += steps
            rate.seconds += seconds
            return
        trial.kept += steps
        if trial.kept >= KEPT_STEPS:  # contexts have grown, other experts are held
            del self._trials[num_sessions]
