"""The router's three rules against plain numpy versions."""

from __future__ import annotations

import numpy as np
import pytest

from moechat import _native

V3 = {"experts_per_token": 8, "num_groups": 8, "groups_kept": 4}


def reference(logits, bias, experts_per_token, num_groups, groups_kept, normalise, scaling):
    with np.errstate(over="ignore"):
        score = 1 / (1 + np.exp(-logits.astype(np.float64)))
    biased = (score.astype(np.float32) + bias).astype(np.float64)
    biased[np.isnan(biased)] = -np.inf
    grouped = biased.reshape(num_groups, -1)
    group_score = np.sort(grouped, axis=1)[:, -2:].sum(axis=1)
    kept = np.argsort(-group_score, kind="stable")[:groups_kept]
    size = grouped.shape[1]
    candidates = sorted(e for g in kept for e in range(g * size, (g + 1) * size))
    ids = sorted(candidates, key=lambda e: (-biased[e], e))[:experts_per_token]
    weights = score[ids]
    if normalise:
        weights = weights / (weights.sum() + 1e-20)
    return np.array(ids), weights * scaling


def inputs(num_experts: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    logits = generator.standard_normal(num_experts).astype(np.float32)
    return logits, (0.1 * generator.standard_normal(num_experts)).astype(np.float32)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(
    ("num_experts", "rule"),
    [
        (256, V3),
        (256, {"experts_per_token": 8, "num_groups": 1, "groups_kept": 1}),
        (16, {"experts_per_token": 4, "num_groups": 4, "groups_kept": 1}),
        (12, {"experts_per_token": 3, "num_groups": 12, "groups_kept": 5}),
        (1, {"experts_per_token": 1, "num_groups": 1, "groups_kept": 1}),
    ],
)
def test_matches_the_rule(num_experts: int, rule: dict[str, int], normalise: bool, seed: int):
    logits, bias = inputs(num_experts, seed)
    ids, weights = _native.route(
        logits, bias, "sigmoid", **rule, normalise_weights=normalise, routed_scaling=2.5
    )
    wanted_ids, wanted = reference(logits, bias, *rule.values(), normalise, 2.5)
    np.testing.assert_array_equal(ids, wanted_ids)
    np.testing.assert_allclose(weights, wanted, rtol=1e-6)


def route(logits: list[float], bias: list[float], *rule: int) -> list[int]:
    ids, _ = _native.route(
        np.array(logits, np.float32), np.array(bias, np.float32), "sigmoid", *rule, True, 1.0
    )
    return ids.tolist()


def test_ties_go_to_the_lower_id() -> None:
    assert route([0.0] * 8, [0.0] * 8, 3, 1, 1) == [0, 1, 2]
    assert route([0.0] * 8, [0.0] * 8, 3, 4, 2) == [0, 1, 2]
    assert route([0, 5, 5, 0], [0.0] * 4, 3, 1, 1) == [1, 2, 0]


def test_the_bias_chooses_but_does_not_weigh() -> None:
    logits, bias = np.array([1, 0, -1], np.float32), np.array([0, 0, 5], np.float32)
    ids, weights = _native.route(logits, bias, "sigmoid", 2, 1, 1, False, 1.0)
    assert ids.tolist() == [2, 0]
    np.testing.assert_allclose(weights, 1 / (1 + np.exp([1.0, -1.0])), rtol=1e-6)


def test_a_group_counts_by_its_two_best() -> None:
    # Group 0 has the single best expert, group 1 the better pair.
    assert route([3, -9, -9, 1, 1, -9], [0.0] * 6, 2, 2, 1) == [3, 4]


def test_nan_is_chosen_last() -> None:
    nan = float("nan")
    assert route([nan, 0, 1, nan], [0.0] * 4, 2, 1, 1) == [2, 1]
    assert route([nan, 0, 1, nan], [0.0] * 4, 4, 1, 1) == [2, 1, 0, 3]
    # One NaN in a group makes its pair the worst.
    assert route([nan, 9, -5, -5], [0.0] * 4, 2, 2, 1) == [2, 3]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30, -1e30])
@pytest.mark.parametrize("count", [1, 100, 255, 256])
def test_hostile_logits_still_give_distinct_ids_in_range(value: float, count: int) -> None:
    logits, bias = inputs(256, 3)
    logits[np.random.default_rng(4).permutation(256)[:count]] = value
    ids, weights = _native.route(
        logits, bias, "sigmoid", **V3, normalise_weights=True, routed_scaling=2.5
    )
    assert len(set(ids.tolist())) == 8
    assert ((ids >= 0) & (ids < 256)).all()
    if not np.isnan(value):
        wanted_ids, wanted = reference(logits, bias, *V3.values(), True, 2.5)
        np.testing.assert_array_equal(ids, wanted_ids)
        np.testing.assert_allclose(weights, wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("experts", "biases", "rule"),
    [
        (8, 7, (2, 1, 1)), (0, 0, (1, 1, 1)), (8, 8, (2, 3, 1)), (8, 8, (2, 0, 1)),
        (8, 8, (2, 2, 3)), (8, 8, (2, 2, 0)), (8, 8, (5, 2, 1)), (8, 8, (0, 1, 1)),
    ],
)  # fmt: skip
def test_rules_that_do_not_fit_are_refused(experts: int, biases: int, rule: tuple[int, ...]):
    with pytest.raises(_native.NativeError):
        route([0.0] * experts, [0.0] * biases, *rule)


def test_a_bias_that_is_not_finite_is_refused() -> None:
    with pytest.raises(_native.NativeError, match="finite"):
        route([0.0, 0.0], [0.0, float("nan")], 1, 1, 1)


def softmax_reference(logits, num_groups, groups_kept, experts_per_token, normalise, scaling):
    wide = logits.astype(np.float64)
    score = np.exp(wide - wide.max())
    score /= score.sum()
    grouped = score.reshape(num_groups, -1)
    kept = np.argsort(-grouped.max(axis=1), kind="stable")[:groups_kept]
    size = grouped.shape[1]
    candidates = sorted(e for g in kept for e in range(g * size, (g + 1) * size))
    ids = sorted(candidates, key=lambda e: (-score[e], e))[:experts_per_token]
    weights = score[ids]
    return np.array(ids), scaling * (weights / weights.sum() if normalise else weights)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (16, 3)])
def test_softmax_over_all(groups: int, kept: int, normalise: bool, seed: int) -> None:
    logits = 3 * inputs(64, seed)[0]
    ids, weights = _native.route(logits, None, "softmax", 6, groups, kept, normalise, 1.5)
    wanted_ids, wanted = softmax_reference(logits, groups, kept, 6, normalise, 1.5)
    np.testing.assert_array_equal(ids, wanted_ids)
    np.testing.assert_allclose(weights, wanted, rtol=2e-6)


def test_a_softmax_group_counts_by_its_best() -> None:
    logits = np.array([3, -9, -9, 1, 1, -9], np.float32)
    ids, _ = _native.route(logits, None, "softmax", 2, 2, 1, False, 1.0)
    assert ids.tolist() == [0, 1]


@pytest.mark.parametrize("seed", range(10))
def test_softmax_over_the_chosen(seed: int) -> None:
    logits = 4 * inputs(32, seed)[0]
    ids, weights = _native.route(logits, None, "softmax_chosen", 4, 1, 1, False, 1.0)
    wanted = np.argsort(-logits, kind="stable")[:4]
    np.testing.assert_array_equal(ids, wanted)
    chosen = np.exp(logits[wanted].astype(np.float64) - logits.max())
    np.testing.assert_allclose(weights, chosen / chosen.sum(), rtol=2e-6)


def test_an_unknown_scoring_is_refused() -> None:
    with pytest.raises(_native.NativeError, match="scoring"):
        _native.route(np.zeros(4, np.float32), None, "tanh", 1, 1, 1, False, 1.0)
