"""Rotary frequencies of DeepSeek: plain, or YaRN with its two mscale rules. Float64 throughout."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Yarn:
    """The settings of YaRN as config.json gives them."""

    factor: float
    original_context_tokens: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float

    @property
    def amplitude(self) -> float:
        """What cos and sin are multiplied by."""
        return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)

    @property
    def softmax_factor(self) -> float:
        """What the softmax scale is multiplied by."""
        return _mscale(self.factor, self.mscale_all_dim) ** 2


def inverse_frequencies(rope_dim: int, theta: float, yarn: Yarn | None) -> tuple[float, ...]:
    """Radians a position of each of the ``rope_dim / 2`` pairs.

    YaRN keeps fast pairs (over ``beta_fast`` turns within the original context), divides slow ones
    (under ``beta_slow`` turns) by the factor, and blends linearly between, by pair index.
    """
    plain = [theta ** (-2 * pair / rope_dim) for pair in range(rope_dim // 2)]
    if yarn is None:
        return tuple(plain)

    def pair_with_turns(turns: float) -> float:
        positions_a_turn = yarn.original_context_tokens / (turns * 2 * math.pi)
        return rope_dim * math.log(positions_a_turn) / (2 * math.log(theta))

    # The bound is rope_dim - 1, although pairs end at rope_dim / 2: so the reference has it.
    first = max(math.floor(pair_with_turns(yarn.beta_fast)), 0)
    last = min(math.ceil(pair_with_turns(yarn.beta_slow)), rope_dim - 1)
    width = last - first if last != first else 0.001
    scaled = []
    for pair, frequency in enumerate(plain):
        slow = min(max((pair - first) / width, 0.0), 1.0)
        scaled.append(frequency * (1.0 - slow) + frequency / yarn.factor * slow)
    return tuple(scaled)


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0
