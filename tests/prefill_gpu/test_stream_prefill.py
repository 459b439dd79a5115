"""Streamed prefill on torch's CPU device: against transformers, the native prefill, and itself."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from oracles import ORACLE_NAMES, expected, oracle_folder

from moechat import _native
from moechat.engine.loading import LoadedModel, load_model
from moechat.kv.cache import KVCache
from moechat.prefill.cpu import CpuPrefill, LayerOutput

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")
from plain_source import PlainSource  # noqa: E402

from moechat.prefill.gpu.stream_prefill import StreamPrefill  # noqa: E402

EXACT_BOUND = 1e-3
MARGIN = 0.25
NEVER = _native.CancelFlag()


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def loaded(name: str, compute: str) -> LoadedModel:
    return load_model(oracle_folder(name), compute)


@functools.cache
def want(name: str) -> dict[str, np.ndarray]:
    return expected(oracle_folder(name))


def streamed(name, compute, cache, ids, *, group=3, **settings) -> StreamPrefill:
    source = PlainSource(name, compute, group=group)
    return StreamPrefill(source.spec, source, cache, ids, **settings)


def native(name, compute, cache, ids) -> CpuPrefill:
    return CpuPrefill(loaded(name, compute).native, _native.ThreadPool(1), cache, ids)


def new_cache(name, compute) -> KVCache:
    return KVCache(0, loaded(name, compute).spec, compute)


def run(span, cache, window=0) -> list[LayerOutput]:
    outputs = []
    for _ in range(cache.num_layers):
        outputs.append(span.run_layer(NEVER, window))
    return outputs


def append(cache: KVCache, first: int, outputs: list[LayerOutput]) -> None:
    for layer, output in enumerate(outputs):
        positions = np.arange(first, first + len(output.kv_TW), dtype=np.int32)
        cache.native.append(layer, positions, output.kv_TW)


def values(slots: np.ndarray) -> np.ndarray:
    if slots.dtype == np.uint16:
        return (slots.astype(np.uint32) << 16).view(np.float32)
    return slots


@pytest.mark.parametrize("name", ORACLE_NAMES)
def test_exact_mode_is_transformers_in_float32(name):
    for prompt in range(3):
        ids = want(name)[f"prompt_{prompt}_ids"].tolist()
        cache = new_cache(name, "exact")
        span = streamed(name, "exact", cache, ids)
        moe_layers = want(name)["moe_layers"].tolist() if "moe_layers" in want(name) else []
        for layer in range(cache.num_layers):
            chosen_TK = span.run_layer(NEVER).router_ids_TK
            if prompt != 1:
                continue
            error = np.abs(span.hidden_TD - want(name)["hidden"][layer + 1]).max()
            assert error <= EXACT_BOUND
            assert (chosen_TK.shape[1] > 0) == (layer in moe_layers)
            if layer in moe_layers:
                expected_TK = want(name)["router_ids"][moe_layers.index(layer)]
                assert (np.sort(chosen_TK, 1) == np.sort(expected_TK, 1)).all()
        logits = span.logits(NEVER, 0)
        last = want(name)[f"prompt_{prompt}_last_logits"]
        assert np.abs(logits[-1] - last).max() <= EXACT_BOUND
        assert int(logits[-1].argmax()) == int(want(name)[f"prompt_{prompt}_greedy"][0])
        if prompt == 1:
            assert np.abs(logits - want(name)["all_logits"]).max() <= EXACT_BOUND
