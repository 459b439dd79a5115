"""What streamed prefill must give, whatever its weights come from and however many lanes it has.

``make(name, compute, cache, ids)`` is a span of an oracle folder's model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from oracles import expected, meta, oracle_folder

from moechat import _native
from moechat.engine.loading import LoadedModel, load_model
from moechat.kv.cache import KVCache
from moechat.prefill.cpu import CpuPrefill, LayerOutput

Make = Callable[[str, str, KVCache, list[int]], Any]
EXACT_BOUND = 1e-3
MARGIN = 0.25
NEVER = _native.CancelFlag()


@functools.cache
def loaded(name: str, compute: str) -> LoadedModel:
    return load_model(oracle_folder(name), compute)


@functools.cache
def want(name: str) -> dict[str, np.ndarray]:
    return expected(oracle_folder(name))


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


def rms_bound(name: str) -> float:
    facts = meta(oracle_folder(name))
    return 2 * facts["bf16_compute"]["hidden_rel_rms"] * facts["logits_std"]


def check_exact_mode(name: str, make: Make, prompts: Iterable[int] = range(3)) -> None:
    """Hidden states, routing and logits are transformers' in float32."""
    for prompt in prompts:
        ids = want(name)[f"prompt_{prompt}_ids"].tolist()
        cache = new_cache(name, "exact")
        span = make(name, "exact", cache, ids)
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


def check_default_mode_error(name: str, make: Make) -> None:
    """Against float32 transformers: within twice the rms of their own BF16 error."""
    cache = new_cache(name, "bf16")
    span = make(name, "bf16", cache, want(name)["prompt_1_ids"].tolist())
    run(span, cache)
    error = span.logits(NEVER, 0) - want(name)["all_logits"]
    rms = float(np.sqrt(np.mean(error**2)))
    print(f"{name}: logits rms error {rms:.4f}, bound {rms_bound(name):.4f}")
    assert rms <= rms_bound(name)


def check_choice(name: str, make: Make) -> None:
    """Teacher-forced argmax wherever the native margin is clear.

    As in test_oracles.py a router's near tie may flip one choice of a folder, where the routing of
    that very token differs.
    """
    flips = 0
    for prompt in range(3):
        ids = want(name)[f"prompt_{prompt}_ids"].tolist()
        chain = ids + want(name)[f"prompt_{prompt}_greedy"].tolist()[:-1]
        cache = new_cache(name, "bf16")
        spans = [make_span(name, "bf16", cache, chain) for make_span in (native, make)]
        layers = [[np.sort(o.router_ids_TK, 1) for o in run(span, cache)] for span in spans]
        rerouted_T = np.any([(a != b).any(1) for a, b in zip(*layers)], axis=0)
        theirs, ours = (span.logits(NEVER, 0) for span in spans)
        top_T2 = np.sort(theirs, axis=1)[:, -2:]
        clear_T = top_T2[:, 1] - top_T2[:, 0] >= MARGIN
        assert clear_T.sum() > len(chain) // 2
        differ_T = clear_T & (theirs.argmax(1) != ours.argmax(1))
        assert not (differ_T & ~rerouted_T).any()
        flips += int(differ_T.sum())
    assert flips <= 1
