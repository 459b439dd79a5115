"""Experts whose weights are split over faked NUMA nodes: the same sums, joined in node order."""

from __future__ import annotations

import numpy as np
import pytest
from expert_model import HIDDEN, NUM_EXPERTS, expert_model, run_experts
from formats import BLOCKS
from reference import BF16, F32, FP8, VARIANTS, Variant

from moechat import _native

INT4, MXFP4 = Variant("int4", "bf16", (1, 32)), Variant("mxfp4", "e8m0", (1, 32))
Q8_0, Q4_K = Variant("q8_0"), Variant("q4_k")
MAIN = [FP8, INT4, MXFP4, BF16, Q8_0, Q4_K]


def inner_of(variant):
    """Elements that no scale grid and no number of nodes divides; a multiple of the block."""
    return 3 * 256 if BLOCKS.get(variant.format, (1,))[0] == 256 else 352


def faked(num_nodes, threads=2):
    return _native.ThreadPool(threads, [(-1, [])] * num_nodes)


def make_resident(model, pool):
    weights = _native.ResidentWeights(model, pool)
    while weights.fill(100_000):
        pass
    weights.install()
    return weights


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_parts_add_up(isa, variant):
    """Only the order of sums may differ: 1e-5 of the largest output; a lost column gives 1e-2."""
    for compute, rows in (("bf16", slice(0, 3)), ("exact", slice(0, 18))):
        model = expert_model([variant], inner_of(variant), compute)
        mapped = run_experts(model, _native.ThreadPool(2), rows)
        assert np.isfinite(mapped).all()
        for num_nodes in (1, 2, 3):
            pool = faked(num_nodes)
            weights = make_resident(model, pool)
            assert (weights.num_resident, weights.num_mapped) == (NUM_EXPERTS, 0)
            assert min(weights.node_bytes) > 0
            parts = run_experts(model, pool, rows)
            if num_nodes == 1:
                assert parts.tobytes() == mapped.tobytes()
            assert np.abs(parts - mapped).max() <= 1e-5 * np.abs(mapped).max()
            # The sums are the model's, whichever pool computes them.
            assert run_experts(model, _native.ThreadPool(1), rows).tobytes() == parts.tobytes()
            weights.release()
        assert run_experts(model, _native.ThreadPool(1), rows).tobytes() == mapped.tobytes()


@pytest.mark.parametrize("variant", MAIN, ids=str)
def test_a_rows_bits_depend_on_it_alone(isa, variant):
    model = expert_model([variant], inner_of(variant), "bf16")
    weights = make_resident(model, faked(2))
    alone = np.concatenate([run_experts(model, faked(2), slice(r, r + 1)) for r in range(16)])
    for rows in range(1, 17):
        for threads in (1, 2, 3) if rows in (1, 7, 16) else (2,):
            together = run_experts(model, faked(2, threads), slice(0, rows))
            assert together.tobytes() == alone[:rows].tobytes(), (rows, threads)
    weights.release()


def test_a_rows_bits_do_not_depend_on_how_tasks_are_cut():
    """Wide matrices: two experts share a task (2 MB of a node's share), four do not."""
    model = expert_model([F32], 12288, "exact", hidden=32)
    weights = make_resident(model, faked(2))
    alone = [run_experts(model, faked(2), slice(r, r + 1), 32).tobytes() for r in range(16)]
    assert run_experts(model, faked(2), slice(0, 16), 32).tobytes() == b"".join(alone)
    weights.release()


def test_what_cannot_be_split_stays_mapped():
    """Two formats in one layer: of the one, a block is as long as the inner dimension."""
    model = expert_model([Q4_K, BF16], 256, "exact")
    mapped = run_experts(model, _native.ThreadPool(2), slice(0, 16))
    pool = faked(2)
    weights = make_resident(model, pool)
    assert (weights.num_resident, weights.num_mapped) == (NUM_EXPERTS // 2, NUM_EXPERTS // 2)
    assert sum(weights.node_bytes) == NUM_EXPERTS // 2 * 3 * 256 * HIDDEN * 2
    parts = run_experts(model, pool, slice(0, 16))
    assert np.abs(parts - mapped).max() <= 1e-5 * np.abs(mapped).max()
    for row in range(16):
        alone = run_experts(model, pool, slice(row, row + 1))
        assert alone.tobytes() == parts[row : row + 1].tobytes()
    weights.release()


def test_more_nodes_than_shares():
    model = expert_model([Q4_K], 512, "exact")
    mapped = run_experts(model, _native.ThreadPool(2), slice(0, 5))
    pool = faked(3)
    weights = make_resident(model, pool)
    assert weights.num_resident == NUM_EXPERTS and sorted(weights.node_bytes)[0] == 0
    parts = run_experts(model, pool, slice(0, 5))
    assert np.abs(parts - mapped).max() <= 1e-5 * np.abs(mapped).max()


def test_the_order_of_calls_is_checked():
    model = expert_model([BF16], 64, "exact")
    weights = _native.ResidentWeights(model, faked(2))
    assert weights.fill(1) > 0
    with pytest.raises(_native.NativeError, match="not all resident"):
        weights.install()
    while weights.fill(1 << 20):
        pass
    weights.install()
    with pytest.raises(_native.NativeError, match="already"):
        _native.ResidentWeights(model, faked(2))
    weights.release()
    weights.release()
    for late in (weights.install, lambda: weights.fill(1)):
        with pytest.raises(_native.NativeError, match="released"):
            late()
