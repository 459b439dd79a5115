"""Batch invariance (design 3.6): a row's bits do not depend on its neighbours or on the threads."""

from __future__ import annotations

import numpy as np
import pytest

from moechat import _native
from moechat.decode.step import DecodeStep, StepRow
from moechat.engine.loading import load_model
from moechat.kv.cache import KVCache


@pytest.fixture(params=_native.supported_instruction_sets())
def instruction_set(request):
    before = _native.active_instruction_set()
    _native.force_instruction_set(request.param)
    assert _native.active_instruction_set() == request.param
    yield request.param
    _native.force_instruction_set(before)


def run(model, threads, batch, compute):
    """Logits of 16 different token chains of 5 tokens, stepped ``batch`` chains at a time."""
    spec = model.spec
    step = DecodeStep(model.native, _native.ThreadPool(threads))
    caches = [KVCache(i, spec, compute) for i in range(16)]
    logits = np.zeros((16, 5, spec.vocab_size), np.float32)
    for first in range(0, 16, batch):
        chains = range(first, min(first + batch, 16))
        for i in range(5):
            rows = [StepRow(caches[chain], [7 + 3 * chain + i * chain]) for chain in chains]
            for chain, row in zip(chains, step.run(rows)):
                logits[chain, i] = row[0]
    return logits


@pytest.mark.parametrize("compute", ["bf16", "exact"])
def test_rows_and_threads_are_bitwise_equal(pipeline_oracle, instruction_set, compute):
    model = load_model(pipeline_oracle, compute)
    alone = run(model, threads=1, batch=1, compute=compute)
    assert np.isfinite(alone).all()
    for batch in range(1, 17):
        for threads in (1, 2, 3) if batch in (1, 5, 16) else (2,):
            together = run(model, threads, batch, compute)
            assert together.tobytes() == alone.tobytes(), (batch, threads)


def test_several_tokens_a_row_equal_one_by_one(small_oracle):
    model = load_model(small_oracle, "bf16")
    spec = model.spec
    step = DecodeStep(model.native, _native.ThreadPool(2))
    ids = list(range(3, 43))
    single = KVCache(0, spec, "bf16")
    for token in ids:
        (last,) = step.run([StepRow(single, [token])])
    block = KVCache(1, spec, "bf16")
    (logits,) = step.run([StepRow(block, ids)])
    assert logits.tobytes() == last.tobytes()
    assert block.read(1, 0, 40).tobytes() == single.read(1, 0, 40).tobytes()


@pytest.mark.parametrize("compute", ["bf16", "exact"])
def test_rows_of_two_tokens_have_the_logits_of_single_steps(
    pipeline_oracle, instruction_set, compute
):
    """What speculation relies on; 11 of 16 tokens' logits, in rows of 1, 2 and 3 tokens."""
    model = load_model(pipeline_oracle, compute)
    step = DecodeStep(model.native, _native.ThreadPool(2))
    chains = [[7, 8], [30, 31, 32], [50], [60, 61, 62], [9, 9], [70, 71], [80], [90, 3]]
    wanted = [2, 1, 1, 3, 2, 0, 0, 2]
    caches = [KVCache(i, model.spec, compute) for i in range(len(chains))]
    rows = [StepRow(*row) for row in zip(caches, chains, wanted)]
    for chain, logits, count in zip(chains, step.run(rows), wanted):
        alone = KVCache(99, model.spec, compute)
        single = [step.run([StepRow(alone, [token])])[0] for token in chain]
        if count == 0:
            assert logits is None
        else:
            assert logits.tobytes() == np.concatenate(single[-count:]).tobytes()


def test_experts_entry_point(small_oracle):
    """experts(layer, x, ids, weights) is the weighted sum of single experts, bit for bit a row."""
    model = load_model(small_oracle, "exact")
    pool = _native.ThreadPool(2)
    layer = next(i for i, layer in enumerate(model.spec.layers) if layer.moe)
    random = np.random.default_rng(3)
    x = random.standard_normal((5, model.spec.hidden_size), np.float32)
    ids = np.array([[0, 3], [3, 1], [7, 0], [2, 5], [6, 4]], np.int32)
    weights = random.random((5, 2), np.float32)
    experts = _native.Experts(model.native, pool)

    def run(x, ids, weights):
        out = np.full_like(x, np.nan)
        experts.run(layer, x, ids, weights, out)
        return out

    y = run(x, ids, weights)
    for row in range(5):
        own = slice(row, row + 1)
        assert run(x[own], ids[own], weights[own]).tobytes() == y[own].tobytes()
        one = np.ones((1, 1), np.float32)
        parts = [run(x[own], ids[own, k : k + 1], one) for k in range(2)]
        total = weights[row, 0] * parts[0] + weights[row, 1] * parts[1]
        assert np.abs(total - y[row]).max() < 1e-5 * np.abs(total).max()
    with pytest.raises(_native.NativeError, match="expert id"):
        run(x, np.full((5, 2), 8, np.int32), weights)
    with pytest.raises(_native.NativeError, match="twice"):
        run(x, np.full((5, 2), 1, np.int32), weights)
