"""Tiers for the tokens of one layer of one span, under a budget of bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moechat.kv.ladder import Ladder
from moechat.kv.rank import descending
from moechat.kv.tiers import DROPPED


@dataclass(frozen=True)
class Plan:
    """What becomes of each token: ``tiers`` (uint8 [n], DROPPED among them) and what it costs.

    ``num_bytes`` counts payload, scales and centre, not the header of a packet.
    """

    tiers: NDArray[np.uint8]
    num_dropped: int
    num_bytes: int


def allocate(
    importance_n: NDArray[np.float64],
    protected: NDArray[np.int64],
    budget_bytes: int,
    ladder: Ladder,
) -> Plan:
    """Spend ``budget_bytes`` where importance times loss avoided is greatest for each byte.

    Minimises the sum of importance * loss(tier): a greedy walk up the rungs, which is the optimum
    up to the last step because gains fall from rung to rung (Lagrange). All tokens start at the
    lowest rung. If even that is over the budget, the least important are dropped, never the last
    token: so one token's lowest rung is the least that a plan costs. ``protected`` (indices, most
    precious first) go to FP16 before anything else as far as that drops nobody; where tokens must
    be dropped anyway, they go to FP16 while bytes last. Among equals the later token is preferred.
    """
    num_tokens = len(importance_n)
    tiers = np.full(num_tokens, DROPPED, np.uint8)
    if num_tokens == 0:
        return Plan(tiers, 0, 0)
    lowest, top = ladder.cost_bytes[0], ladder.cost_bytes[-1]
    spare = budget_bytes - num_tokens * lowest
    if spare < 0:
        return _drop(importance_n, protected, budget_bytes, ladder)
    tiers[:] = ladder.tiers[0]
    if top == lowest:  # parts so narrow that their scales cost what fewer bits save
        return Plan(tiers, 0, num_tokens * lowest)
    protected = protected[: spare // (top - lowest)]
    tiers[protected] = ladder.tiers[-1]
    spare -= len(protected) * (top - lowest)

    free = np.ones(num_tokens, bool)
    free[protected] = False
    tokens = np.flatnonzero(free)
    if len(tokens) == 0:
        return Plan(tiers, 0, budget_bytes - spare)
    steps, gains = np.diff(ladder.cost_bytes)[::-1], np.array(ladder.gains())[::-1]
    # Dear steps first: among equals the later index wins, so a token's steps keep their order.
    scores = np.multiply.outer(gains / gains.max(), importance_n[tokens])
    step, token = np.divmod(descending(scores.ravel()), len(tokens))
    spent = np.cumsum(steps[step])
    taken = int(np.searchsorted(spent, spare, side="right"))
    climbed = np.bincount(token[:taken], minlength=len(tokens))
    tiers[tokens] = np.array(ladder.tiers, np.uint8)[climbed]
    if taken:
        spare -= int(spent[taken - 1])
    return Plan(tiers, 0, budget_bytes - spare)


def _drop(
    importance_n: NDArray[np.float64],
    protected: NDArray[np.int64],
    budget_bytes: int,
    ladder: Ladder,
) -> Plan:
    num_tokens = len(importance_n)
    lowest, top = ladder.cost_bytes[0], ladder.cost_bytes[-1]
    protected = protected[: budget_bytes // top]
    rank = importance_n.copy()
    rank[-1] = np.inf
    free = np.ones(num_tokens, bool)
    free[protected] = False
    tokens = np.flatnonzero(free)
    num_kept = (budget_bytes - len(protected) * top) // lowest
    if num_tokens - 1 not in protected:
        num_kept = max(num_kept, 1)
    num_kept = min(num_kept, num_tokens - len(protected))
    order = tokens[descending(rank[tokens])]
    tiers = np.full(num_tokens, DROPPED, np.uint8)
    tiers[order[:num_kept]] = ladder.tiers[0]
    tiers[protected] = ladder.tiers[-1]
    num_dropped = num_tokens - num_kept - len(protected)
    return Plan(tiers, num_dropped, num_kept * lowest + len(protected) * top)
