"""Which experts calls use: the walk returns late, rows of a uniform call differ."""

from __future__ import annotations

import numpy as np
import pytest

from moechat.bench.kernels.experts import Routes


@pytest.mark.parametrize(("num_experts", "per_token"), [(64, 8), (10, 4), (8, 8), (7, 3)])
def test_an_expert_returns_only_after_all_others(num_experts, per_token):
    routes = Routes("same", num_experts, per_token, batch=1)
    walked = np.concatenate([routes.at(call)[0][0] for call in range(3 * len(routes))])
    order = walked[:num_experts]
    assert sorted(order) == list(range(num_experts))
    assert not np.array_equal(order, np.sort(order)) or num_experts < 3
    np.testing.assert_array_equal(walked, np.resize(order, len(walked)))


def test_same_gives_every_row_the_same_experts():
    routes = Routes("same", 64, 8, batch=5)
    ids, distinct = routes.at(3)
    assert ids.shape == (5, 8) and ids.dtype == np.int32 and ids.flags.c_contiguous
    assert (ids == ids[0]).all() and distinct == 8
    np.testing.assert_allclose(routes.weights.sum(1), 1, rtol=1e-6)


def test_uniform_counts_each_distinct_expert_once():
    routes = Routes("uniform", 64, 8, batch=8)
    counts = []
    for call in range(len(routes)):
        ids, distinct = routes.at(call)
        assert all(len(set(row)) == 8 for row in ids.tolist())
        assert distinct == len(set(ids.reshape(-1).tolist()))
        counts.append(distinct)
    # 64 (1 - (1 - 8/64)^8) = 42.0 distinct experts are expected.
    assert abs(np.mean(counts) - 42.0) < 1.5


def test_one_uniform_row_walks():
    same, uniform = Routes("same", 16, 4, 1), Routes("uniform", 16, 4, 1)
    for call in range(8):
        np.testing.assert_array_equal(same.at(call)[0], uniform.at(call)[0])
