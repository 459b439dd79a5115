"""The whole chain, slowly, in numpy: which tokens are kept, with which probabilities, in order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moechat.sample.params import SamplingParams


def kept_tokens(
    logits: NDArray[np.float32],
    params: SamplingParams,
    context: Sequence[int] = (),
    answer: Sequence[int] = (),
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Ids in falling order and their probabilities (they sum to 1)."""
    scores = logits.astype(np.float32)
    for token in sorted({*context, *answer}):
        penalty = np.float32(params.repetition_penalty)
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token in sorted(set(answer)):
        scores[token] -= np.float32(params.presence_penalty)
    distance = scores.max() - scores
    order = np.argsort(distance, kind="stable")
    if params.temperature == 0:
        return order[:1], np.ones(1)
    if params.top_k:
        order = order[: params.top_k]
    weights = np.exp(-distance[order].astype(np.float64) / params.temperature)
    probabilities = weights / weights.sum()
    if params.top_p < 1:
        kept = int(np.searchsorted(np.cumsum(probabilities), params.top_p)) + 1
        order, probabilities = order[:kept], probabilities[:kept]
    keep = (probabilities >= params.min_p * probabilities[0]) & (probabilities > 0)
    order, probabilities = order[keep], probabilities[keep]
    return order, probabilities / probabilities.sum()


def philox4x32(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Ten rounds, as in the paper."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def uniform(seed: int, position: int) -> float:
    """The draw of a seed and a position, in (0, 1]."""
    low = 0xFFFFFFFF
    words = philox4x32([position & low, position >> 32, 0, 0], [seed & low, seed >> 32])
    return (((words[1] << 32 | words[0]) >> 11) + 1) * 2.0**-53
