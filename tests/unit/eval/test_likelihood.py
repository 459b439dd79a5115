"""Perplexity by its definition, and its change under the noise of windows."""

from __future__ import annotations

import math

import numpy as np
import pytest

from moechat.eval.likelihood import Likelihood, change, likelihood


def test_it_is_the_sum_of_negative_log_probabilities():
    draw = np.random.default_rng(1)
    logits = draw.standard_normal((150, 40)).astype(np.float32)  # more than one piece
    targets = draw.integers(0, 40, 150).tolist()
    exact = logits.astype(np.longdouble)
    shares = np.exp(exact) / np.exp(exact).sum(axis=1, keepdims=True)
    expected = -np.log(shares[np.arange(150), targets]).sum()
    found = likelihood(logits, targets)
    assert found.nats == pytest.approx(float(expected), rel=1e-12)
    assert found.tokens == 150


def test_large_logits_do_not_overflow():
    logits = np.array([[3e4, -3e4]], np.float32)
    assert likelihood(logits, [0]).nats == 0
    assert likelihood(logits, [1]).nats == 6e4
    assert math.isfinite(likelihood(logits, [1]).perplexity)


def test_even_odds_are_the_number_of_choices():
    found = likelihood(np.zeros((3, 7), np.float32), [0, 3, 6])
    assert found.perplexity == pytest.approx(7)
    assert math.isnan(Likelihood().perplexity)


def test_the_change_is_that_of_the_perplexity_of_the_same_windows():
    before = [Likelihood(100, 50), Likelihood(300, 100), Likelihood(9, 1)]
    after = [Likelihood(101, 50), Likelihood(303, 100)]
    found = change(before, after)
    assert found.percent == pytest.approx(100 * (math.exp(4 / 150) - 1))
    # Differences a token are 0.02 and 0.03: the error of their mean is 0.005.
    assert found.standard_error_percent == pytest.approx(100 * math.exp(4 / 150) * 0.005)
    assert change(before[:1], after[:1]).standard_error_percent is None
    assert change(before, []) is None
