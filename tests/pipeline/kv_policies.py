"""Policies that only tests need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moechat.kv.tiers import DROPPED, Tier


@dataclass
class Thinning:
    """Drops a share of the tokens, each layer others; the rest crosses bit for bit."""

    share: float
    name: str = "thinning"
    window: int = 0
    centre_keys: bool = False

    def tiers(self, layer, first_position, num_tokens, mass_n=None) -> NDArray[np.uint8]:
        generator = np.random.default_rng([layer, first_position, num_tokens])
        tiers = np.full(num_tokens, Tier.NATIVE, np.uint8)
        tiers[generator.random(num_tokens) < self.share] = DROPPED
        tiers[-1] = Tier.NATIVE
        return tiers


@dataclass
class ByLayer:
    """``choose(layer, num_tokens)`` gives the tiers."""

    choose: Callable[[int, int], NDArray[np.uint8]]
    name: str = "by layer"
    window: int = 0
    centre_keys: bool = False

    def tiers(self, layer, first_position, num_tokens, mass_n=None) -> NDArray[np.uint8]:
        return self.choose(layer, num_tokens)
