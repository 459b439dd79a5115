"""Plans against every assignment of tiers that the budget allows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moechat.kv.ladder import LOSS, Ladder
from moechat.kv.layout import KVLayout, Part
from moechat.kv.plan import allocate
from moechat.kv.tiers import DROPPED, Tier, bytes_per_token

THREE = Ladder((Tier.INT4, Tier.INT8, Tier.FP16), (34, 66, 128), (329.0, 1.0, 0.0))
TWO = Ladder((Tier.INT8, Tier.FP16), (66, 128), (1.0, 0.0))
NOBODY = np.zeros(0, np.int64)
IMPORTANCE = st.lists(st.sampled_from([0.0, 0.1, 1.0, 2.0, 700.0]), min_size=1, max_size=5)


def loss(importance, tiers, ladder):
    table = dict(zip(ladder.tiers, ladder.loss))
    return sum(value * table[tier] for value, tier in zip(importance, tiers))


def cost(tiers, ladder):
    table = dict(zip(ladder.tiers, ladder.cost_bytes))
    return sum(table.get(tier, 0) for tier in tiers)


@given(IMPORTANCE, st.floats(0, 1), st.sampled_from([THREE, TWO]))
def test_no_assignment_of_the_same_bytes_loses_less(importance, share, ladder):
    n = len(importance)
    lowest, top = ladder.cost_bytes[0], ladder.cost_bytes[-1]
    budget = int(n * (lowest + share * (top - lowest)))
    plan = allocate(np.array(importance), NOBODY, budget, ladder)
    assert plan.num_dropped == 0
    assert plan.num_bytes == cost(plan.tiers, ladder) <= budget
    best = min(
        loss(importance, tiers, ladder)
        for tiers in itertools.product(ladder.tiers, repeat=n)
        if cost(tiers, ladder) <= plan.num_bytes
    )
    assert loss(importance, plan.tiers, ladder) == pytest.approx(best)
    if plan.num_bytes < n * top:  # no step that is next would still fit
        assert budget - plan.num_bytes < max(np.diff(ladder.cost_bytes))


def test_protected_tokens_come_before_important_ones():
    plan = allocate(np.array([9.0, 5.0, 0.0, 0.0]), np.array([3, 2]), 4 * 34 + 94, THREE)
    assert plan.tiers.tolist() == [Tier.INT4, Tier.INT4, Tier.INT4, Tier.FP16]
    plan = allocate(np.array([9.0, 5.0, 0.0, 0.0]), np.array([3, 2]), 4 * 34 + 94 + 32, THREE)
    assert plan.tiers.tolist() == [Tier.INT8, Tier.INT4, Tier.INT4, Tier.FP16]


def test_the_least_important_are_dropped():
    importance = np.array([1.0, 3.0, 2.0, 0.0, 0.5, 0.0])
    plan = allocate(importance, np.array([5]), 128 + 2 * 34, THREE)
    assert plan.tiers.tolist() == [DROPPED, Tier.INT4, Tier.INT4, DROPPED, DROPPED, Tier.FP16]
    assert (plan.num_dropped, plan.num_bytes) == (3, 128 + 2 * 34)


@pytest.mark.parametrize("budget", [0, 1, 33, 34, 67])
def test_the_last_token_stays_without_any_budget(budget):
    plan = allocate(np.array([1.0, 3.0, 0.0]), NOBODY, budget, THREE)
    assert plan.tiers.tolist() == [DROPPED, DROPPED, Tier.INT4]
    assert (plan.num_dropped, plan.num_bytes) == (2, 34)


def test_equal_tokens_are_taken_from_the_end():
    plan = allocate(np.zeros(4), NOBODY, 4 * 34 + 2 * 32, THREE)
    assert plan.tiers.tolist() == [Tier.INT4, Tier.INT4, Tier.INT8, Tier.INT8]
    plan = allocate(np.zeros(4), NOBODY, 2 * 34, THREE)
    assert plan.tiers.tolist() == [DROPPED, DROPPED, Tier.INT4, Tier.INT4]


def test_no_tokens():
    plan = allocate(np.zeros(0), NOBODY, 0, THREE)
    assert (plan.tiers.shape, plan.num_dropped, plan.num_bytes) == ((0,), 0, 0)


@pytest.mark.parametrize("num_tiers", [2, 3, 4])
@pytest.mark.parametrize("width", [1, 2, 16, 64, 128])
def test_a_ladder_rises_and_gains_fall(width, num_tiers):
    layout = KVLayout((Part(0, width, "key"), Part(width, width, "value")))
    ladder = Ladder.of(layout, num_tiers)
    assert ladder.tiers[-1] == Tier.FP16
    assert list(ladder.cost_bytes) == [bytes_per_token(layout, tier) for tier in ladder.tiers]
    assert list(ladder.loss) == [LOSS[tier] for tier in ladder.tiers]
    assert all(low < high for low, high in itertools.pairwise(ladder.cost_bytes))
    gains = ladder.gains()
    assert all(low >= high for low, high in itertools.pairwise(gains))
    if width >= 16:
        assert len(ladder.tiers) == num_tiers


@pytest.mark.parametrize("num_tiers", [2, 3, 4])
def test_a_ladder_of_one_rung(num_tiers):
    """Of parts so narrow that no tier is cheaper than FP16."""
    layout = KVLayout((Part(0, 1, "key"), Part(1, 1, "value")))
    ladder = Ladder.of(layout, num_tiers)
    assert ladder.tiers == (Tier.FP16,)
    plan = allocate(np.ones(5), np.array([4]), 5 * 4 + 3, ladder)
    assert plan.tiers.tolist() == [Tier.FP16] * 5 and plan.num_bytes == 20
    assert allocate(np.ones(5), np.array([4]), 2 * 4, ladder).num_dropped == 3
