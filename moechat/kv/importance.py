"""How much each token that crosses matters to the queries inside the text."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

POOL_TOKENS = 7  # a token of high mass lifts its neighbours: a fact is longer than a token


def token_importance(
    mass_n: NDArray[np.float32] | None,
    num_tokens: int,
    protected: NDArray[np.int64] | None = None,
    pool_tokens: int = POOL_TOKENS,
) -> NDArray[np.float64]:
    """Importance of each new token [num_tokens], >= 0 and finite.

    ``mass_n`` is the part of window_mass that belongs to the new tokens: for each, the attention
    probability that the last w queries give it, summed over them and averaged over the heads. Its
    maximum over ``pool_tokens`` neighbours is taken, as SnapKV does (arXiv 2404.14469). The mass of
    the ``protected`` tokens (indices) does not spread: sinks draw mass for what they are, not for
    what stands beside them. None means that nothing is known: all zero. What is not a number or
    negative counts as zero, infinity as the largest float32. ValueError when ``mass_n`` is not of
    shape [num_tokens].
    """
    if mass_n is None:
        return np.zeros(num_tokens)
    if mass_n.shape != (num_tokens,):
        raise ValueError(f"window_mass has shape {mass_n.shape} for {num_tokens} tokens.")
    largest = float(np.finfo(np.float32).max)
    mass = np.fmax(mass_n.astype(np.float64), 0.0) + 0.0  # fmax: NaN gives 0; -0.0 + 0.0 is 0.0
    np.minimum(mass, largest, out=mass)
    if protected is not None:
        own = mass[protected]
        mass[protected] = 0.0
    reach = pool_tokens // 2
    pooled: NDArray[np.float64] = mass.copy()
    for shift in range(1, min(reach, num_tokens - 1) + 1):
        np.maximum(pooled[shift:], mass[:-shift], out=pooled[shift:])
        np.maximum(pooled[:-shift], mass[shift:], out=pooled[:-shift])
    if protected is not None:
        pooled[protected] = np.maximum(pooled[protected], own)
    return pooled
