"""How far a measurement is: how long the rest takes, by the work that is done."""

from __future__ import annotations

import time
from collections.abc import Callable

from moechat.sizes import duration_text

_SETTLING_SECONDS = 3.0  # before that a guess is worth nothing


class Progress:
    """``work``: all there is to do, in parts (tokens, say) that take about the same time."""

    def __init__(self, work: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._work, self._done = work, 0
        self._clock, self._began = clock, clock()

    def add(self, work: int) -> None:
        """So much was done."""
        self._done += work

    @property
    def left(self) -> str:
        """ ", about 4 min left" behind a line that is shown, or nothing where it is not known."""
        elapsed = self._clock() - self._began
        if not self._done or elapsed < _SETTLING_SECONDS:
            return ""
        seconds = elapsed * (self._work - self._done) / self._done
        return f", about {duration_text(max(seconds, 1))} left"
