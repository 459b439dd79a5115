"""Perplexity from logits: float64 sums over float32 logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PIECE_ROWS = 64  # float64 logits of a large vocabulary, a few dozen megabytes at a time
_MAX_EXPONENT = 700.0  # exp() of more is no float64 any more


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The negative log-likelihood of ``tokens`` tokens in nats, summed."""

    nats: float = 0.0
    tokens: int = 0

    def __add__(self, other: Likelihood) -> Likelihood:
        return Likelihood(self.nats + other.nats, self.tokens + other.tokens)

    @property
    def perplexity(self) -> float:
        """exp of the mean; NaN of no token."""
        if self.tokens == 0:
            return math.nan
        return math.exp(min(self.nats / self.tokens, _MAX_EXPONENT))


def likelihood(logits_TV: NDArray[np.float32], next_ids: Sequence[int]) -> Likelihood:
    """Of the T tokens that follow: row t of the logits predicts ``next_ids[t]``."""
    nats = 0.0
    for begin in range(0, len(next_ids), PIECE_ROWS):
        targets = next_ids[begin : begin + PIECE_ROWS]
        piece_TV = log_softmax(logits_TV[begin : begin + len(targets)])
        nats -= float(np.sum(piece_TV[np.arange(len(targets)), targets]))
    return Likelihood(nats, len(next_ids))


def log_softmax(logits_TV: NDArray[np.float32]) -> NDArray[np.float64]:
    """Logarithms of the probabilities; float64, so of PIECE_ROWS rows at a time."""
    shifted_TV: NDArray[np.float64] = logits_TV.astype(np.float64)
    shifted_TV -= shifted_TV.max(axis=1, keepdims=True)
    shifted_TV -= np.log(np.exp(shifted_TV).sum(axis=1, keepdims=True))
    return shifted_TV


@dataclass(frozen=True, slots=True)
class Change:
    """A relative change of perplexity, and one standard error of it, in percent."""

    percent: float
    standard_error_percent: float | None  # None: of a single window


def change(before: Sequence[Likelihood], after: Sequence[Likelihood]) -> Change | None:
    """Of the same windows, as far as both have them; None where there is none.

    The error is that of the windows' mean difference a token: windows differ from each other far
    more than one window does under two policies, so the difference is taken window by window.
    """
    pairs = list(zip(before, after))
    if not pairs:
        return None
    first = sum((one for one, _ in pairs), Likelihood())
    second = sum((other for _, other in pairs), Likelihood())
    ratio = math.exp(min((second.nats - first.nats) / first.tokens, _MAX_EXPONENT))
    error = None
    if len(pairs) > 1:
        differences = [other.nats / other.tokens - one.nats / one.tokens for one, other in pairs]
        error = 100 * ratio * float(np.std(differences, ddof=1)) / math.sqrt(len(pairs))
    return Change(100 * (ratio - 1), error)
