"""KV policies: which precision each token of a layer crosses from prefill to decode in."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moechat.errors import BadParameter
from moechat.kv.importance import token_importance
from moechat.kv.ladder import TIERS, Ladder, tiers_of
from moechat.kv.layout import KVLayout
from moechat.kv.plan import Plan, allocate
from moechat.kv.rank import descending
from moechat.kv.tiers import DROPPED, Tier, budget_bytes_per_token, bytes_per_token

UNIFORM = {
    "native": Tier.NATIVE,
    "fp16": Tier.FP16,
    "int8": Tier.INT8,
    "int4": Tier.INT4,
    "k8v4": Tier.K8V4,
}
NAMES = (*UNIFORM, "spectrum", "pdtrim", "snapkv")
NUM_SINKS = 4  # StreamingLLM's (arXiv 2309.17453)
WINDOW = 32  # SnapKV's observation window (arXiv 2404.14469), in queries


@dataclass(frozen=True, kw_only=True)
class KVPolicy(ABC):
    """Decides tiers layer by layer. Holds no state: any thread may ask, equal calls agree.

    ``window``: how many of the span's last queries ``mass_n`` is to be of; 0 when it is not read.
    ``centre_keys``: whether the codec takes each key channel's mean off before it quantises.
    """

    name: str
    layout: KVLayout
    window: int = 0
    centre_keys: bool = False

    def tiers(
        self,
        layer: int,
        first_position: int,
        num_tokens: int,
        mass_n: NDArray[np.float32] | None = None,
    ) -> NDArray[np.uint8]:
        """The tier codes of ``plan``, uint8 [num_tokens]."""
        return self.plan(layer, first_position, num_tokens, mass_n).tiers

    def plan(
        self,
        layer: int,
        first_position: int,
        num_tokens: int,
        mass_n: NDArray[np.float32] | None = None,
    ) -> Plan:
        """One layer of a span of new tokens. The last token is never DROPPED.

        ``first_position``: the first token's place in the timeline; ``mass_n`` [num_tokens]: the
        new tokens' part of window_mass. ValueError when the figures do not fit one another.
        """
        if layer < 0 or first_position < 0 or num_tokens < 0:
            raise ValueError("A layer, a position and a number of tokens cannot be negative.")
        if mass_n is not None and mass_n.shape != (num_tokens,):
            raise ValueError(f"window_mass has shape {mass_n.shape} for {num_tokens} tokens.")
        return self._plan(first_position, num_tokens, mass_n)

    def _centre_bytes(self) -> int:
        """What the centre of the keys costs a packet that holds quantised tokens: float16."""
        return 2 * self.layout.centred_width if self.centre_keys else 0

    @abstractmethod
    def _plan(
        self, first_position: int, num_tokens: int, mass_n: NDArray[np.float32] | None
    ) -> Plan: ...


@dataclass(frozen=True, kw_only=True)
class UniformPolicy(KVPolicy):
    """Every token in one tier, at that tier's own bytes, whatever the budget."""

    tier: Tier

    def _plan(
        self, first_position: int, num_tokens: int, mass_n: NDArray[np.float32] | None
    ) -> Plan:
        num_bytes = num_tokens * bytes_per_token(self.layout, self.tier)
        if num_tokens and self.tier not in (Tier.NATIVE, Tier.FP16):
            num_bytes += self._centre_bytes()
        return Plan(np.full(num_tokens, self.tier, np.uint8), 0, num_bytes)


@dataclass(frozen=True, kw_only=True)
class SpectrumPolicy(KVPolicy):
    """Two to four tiers by importance; sinks and the last window in FP16.

    ``budget`` is of 2 bytes an element, in (0, 1]. A plan costs no more than that, or one token in
    the lowest tier where the budget is less. The centre of the keys (a token at most) is paid out
    of what lifts tokens above the lowest tier; where that is not enough it comes on top, because no
    token is dropped for it.
    """

    budget: float
    ladder: Ladder

    def _plan(
        self, first_position: int, num_tokens: int, mass_n: NDArray[np.float32] | None
    ) -> Plan:
        most = math.floor(num_tokens * self.budget / 4)
        protected = _protected(first_position, num_tokens, self.window)[:most]
        # The root: what the next queries read differs from what the last ones read.
        importance_n = np.sqrt(token_importance(mass_n, num_tokens, protected))
        budget_bytes = math.floor(num_tokens * self.budget * budget_bytes_per_token(self.layout))
        costs, centre_bytes = self.ladder.cost_bytes, self._centre_bytes()
        if budget_bytes < num_tokens * costs[-1]:
            least = min(budget_bytes, num_tokens * costs[0])
            budget_bytes = max(budget_bytes - centre_bytes, least)
        plan = allocate(importance_n, protected, budget_bytes, self.ladder)
        if not np.isin(plan.tiers, self.ladder.tiers[:-1]).any():
            return plan
        return replace(plan, num_bytes=plan.num_bytes + centre_bytes)


@dataclass(frozen=True, kw_only=True)
class KeepPolicy(KVPolicy):
    """As many tokens in FP16 as the budget pays for, at least the last; the rest is dropped.

    Kept first: sinks and recent tokens. With ``window`` > 0 (SnapKV-like) recent means the last
    window, and the most important tokens follow; with 0 (PDTrim-like) all the rest is recent.
    """

    budget: float

    def _plan(
        self, first_position: int, num_tokens: int, mass_n: NDArray[np.float32] | None
    ) -> Plan:
        cost_bytes = bytes_per_token(self.layout, Tier.FP16)
        budget_bytes = math.floor(num_tokens * self.budget * budget_bytes_per_token(self.layout))
        num_kept = min(max(budget_bytes // cost_bytes, 1), num_tokens)
        recent = self.window or num_tokens
        protected = _protected(first_position, num_tokens, recent)[:num_kept]
        rank = token_importance(mass_n, num_tokens, protected)
        rank[protected] = np.inf
        tiers = np.full(num_tokens, DROPPED, np.uint8)
        tiers[descending(rank)[:num_kept]] = Tier.FP16
        return Plan(tiers, num_tokens - num_kept, num_kept * cost_bytes)


def make_policy(
    name: str,
    budget: float,
    layout: KVLayout,
    *,
    num_tiers: int | None = None,
    centre_keys: bool | None = None,
) -> KVPolicy:
    """The policy of a name in NAMES.

    ``budget`` in (0, 1] is of 2 bytes an element, scales included; native, fp16, int8, int4 and
    k8v4 cost what they cost and do not read it. ``num_tiers`` is spectrum's: 2 (FP16, INT8), 3
    (INT4 as well) or 4 (K8V4 as well); None: best_num_tiers. ``centre_keys`` None: spectrum on
    grouped attention centres, nothing else does. That took 40 % off the divergence that INT4 causes
    in Qwen2.5-Coder-0.5B, and no more than chance in a latent model. Raises BadParameter, a
    ValueError.
    """
    if name not in NAMES:
        raise BadParameter(
            "the KV policy is not known", f"{name!r} is none of them", f"Name one of {NAMES}"
        )
    if not 0.0 < budget <= 1.0:  # NaN as well
        raise BadParameter("the KV budget is out of range", f"{budget} is not in (0, 1]")
    num_tiers = best_num_tiers(layout) if num_tiers is None else num_tiers
    if num_tiers not in TIERS:
        raise BadParameter(
            "the number of KV tiers is out of range", f"{num_tiers} is not 2, 3 or 4"
        )
    if name in UNIFORM:
        tier = UNIFORM[name]
        if tier not in tiers_of(layout):
            raise BadParameter(
                "the KV policy does not suit the model", f"{name} needs values beside the keys"
            )
        return UniformPolicy(name=name, layout=layout, tier=tier, centre_keys=bool(centre_keys))
    if name == "spectrum":
        return SpectrumPolicy(
            name=name,
            layout=layout,
            window=WINDOW,
            centre_keys=_has_keys(layout) if centre_keys is None else centre_keys,
            budget=budget,
            ladder=Ladder.of(layout, num_tiers),
        )
    window = WINDOW if name == "snapkv" else 0
    return KeepPolicy(name=name, layout=layout, window=window, budget=budget)


def best_num_tiers(layout: KVLayout) -> int:
    """What measured best where INT4 is allowed: K8V4 as well, if the layout has that tier."""
    return 4 if Tier.K8V4 in tiers_of(layout) else 3


def _has_keys(layout: KVLayout) -> bool:
    return any(part.kind == "key" for part in layout.parts)


def _protected(first_position: int, num_tokens: int, window: int) -> NDArray[np.int64]:
    """The last token, the text's first ones, then the rest of the last window, latest first."""
    tokens = np.arange(num_tokens)
    sinks = tokens[:-1][: NUM_SINKS if first_position == 0 else 0]
    recent = tokens[len(sinks) :][::-1][:window]
    return np.concatenate([recent[:1], sinks, recent[1:]])
