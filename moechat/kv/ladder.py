"""The tiers that a plan may use, dearest last, with what each costs and what it loses."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from moechat.kv.layout import KVLayout
from moechat.kv.tiers import Tier, bytes_per_token

# Squared error of rounding to 2^(bits - 1) - 1 steps a side, against the largest element's square:
# 1 / (12 steps^2). Only ratios count. FP16 holds BF16's eight significant bits.
_LOSS_INT8, _LOSS_INT4 = 1 / (12 * 127.0**2), 1 / (12 * 7.0**2)
# Keys pass through the softmax's exponential, values do not: with 4-bit values and 8-bit keys the
# logits' KL divergence is 5 % of that of 4 bits for both (Qwen2.5-Coder-0.5B, keys centred).
_KEY_SHARE = 0.95
LOSS = {
    Tier.FP16: 0.0,
    Tier.INT8: _LOSS_INT8,
    Tier.K8V4: _KEY_SHARE * _LOSS_INT8 + (1 - _KEY_SHARE) * _LOSS_INT4,
    Tier.INT4: _LOSS_INT4,
}
TIERS = {
    2: (Tier.INT8, Tier.FP16),
    3: (Tier.INT4, Tier.INT8, Tier.FP16),
    4: (Tier.INT4, Tier.K8V4, Tier.INT8, Tier.FP16),
}


@dataclass(frozen=True)
class Ladder:
    """Rungs from the cheapest tier to FP16: costs rise, and each step gains less a byte.

    ``tiers``, ``cost_bytes`` (a token) and ``loss`` are of one length. A tier that costs no less
    than a better one, or lies above the line between its neighbours, is no rung.
    """

    tiers: tuple[Tier, ...]
    cost_bytes: tuple[int, ...]
    loss: tuple[float, ...]

    @staticmethod
    def of(layout: KVLayout, num_tiers: int) -> Ladder:
        """The ladder of 2 (INT8, FP16), 3 (INT4, INT8, FP16) or 4 (K8V4 as well) tiers."""
        rungs: list[tuple[Tier, int, float]] = []
        allowed = tiers_of(layout)
        for tier in TIERS[num_tiers]:
            if tier not in allowed:
                continue
            rung = (tier, bytes_per_token(layout, tier), LOSS[tier])
            while rungs and rungs[-1][1] >= rung[1]:
                rungs.pop()
            while len(rungs) > 1 and _gain(rungs[-2], rungs[-1]) < _gain(rungs[-1], rung):
                rungs.pop()
            rungs.append(rung)
        return Ladder(*zip(*rungs))

    def gains(self) -> list[float]:
        """Loss avoided for each byte of each step up; falls from step to step."""
        rungs = list(zip(self.tiers, self.cost_bytes, self.loss))
        return [_gain(low, high) for low, high in pairwise(rungs)]


def tiers_of(layout: KVLayout) -> tuple[Tier, ...]:
    """The tiers that a layout has: K8V4 needs values of their own, latent attention has none."""
    has_values = any(part.kind == "value" for part in layout.parts)
    return tuple(tier for tier in Tier if tier != Tier.K8V4 or has_values)


def _gain(low: tuple[Tier, int, float], high: tuple[Tier, int, float]) -> float:
    return (low[2] - high[2]) / (high[1] - low[1])
