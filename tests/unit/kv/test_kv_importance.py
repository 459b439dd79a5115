"""Importance of tokens and their order, against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moechat.kv.importance import token_importance
from moechat.kv.rank import descending

MASS = st.lists(st.floats(0, 64, width=32), min_size=0, max_size=40)


@given(MASS, st.sets(st.integers(0, 39)))
def test_maximum_over_seven_neighbours(mass, protected):
    n = len(mass)
    protected = sorted(i for i in protected if i < n)
    got = token_importance(np.array(mass, np.float32), n, np.array(protected, np.int64))
    spread = [0.0 if i in protected else mass[i] for i in range(n)]
    for i in range(n):
        near = max(spread[max(i - 3, 0) : i + 4])
        assert got[i] == max(near, mass[i] if i in protected else 0.0)


def test_mass_of_a_protected_token_does_not_spread():
    mass = np.array([30, 0, 0, 0, 0, 2, 0, 0, 0, 0], np.float32)
    assert token_importance(mass, 10, np.array([0])).tolist() == [30, 0, 2, 2, 2, 2, 2, 2, 2, 0]
    assert token_importance(mass, 10).tolist() == [30, 30, 30, 30, 2, 2, 2, 2, 2, 0]


def test_what_is_no_number_counts_as_zero():
    mass = np.array([np.nan, -1, -np.inf, 0, 0, 0, 0, 0, 0, np.inf], np.float32)
    got = token_importance(mass, 10)
    largest = float(np.finfo(np.float32).max)
    assert got.tolist() == [0] * 6 + [largest] * 4


def test_nothing_known_is_all_equal():
    assert token_importance(None, 3).tolist() == [0, 0, 0]


def test_mass_of_another_length():
    with pytest.raises(ValueError, match=r"shape \(3,\) for 4 tokens"):
        token_importance(np.zeros(3, np.float32), 4)


@given(st.lists(st.sampled_from([0.0, 1e-40, 1e-9, 1.0, 1.5, 64.0, 3e38, float("inf")])))
def test_later_first_among_equals(scores):
    order = descending(np.array(scores, np.float64)).tolist()
    assert order == sorted(range(len(scores)), key=lambda i: (-np.float32(scores[i]), -i))
