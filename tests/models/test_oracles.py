"""Every oracle folder through Engine, against Hugging Face transformers.

Exact mode: logits, hidden states, greedy tokens and routing are those of float32 transformers.
Default mode: clear choices stay, and the error stays within twice that of transformers in BF16.
"""

from __future__ import annotations

import numpy as np
import pytest
from oracles import expected, meta

from moechat import SamplingParams, _native
from moechat.prefill.cpu import CpuPrefill

# Other summation orders in float32 move these logits by at most 5e-5; the smallest mistake that
# leaves one feature out (erf in place of tanh in gemma2's gelu) moves them by 2e-3.
EXACT_BOUND = 1e-3
MARGIN = 0.25  # top-1 minus top-2 logit from which a choice is clear
MAX_ROUTING_CHANGES = 10  # what BF16 in transformers changes at most in any of these folders


@pytest.mark.parametrize("piece", [1, 7, 64, 1000])
def test_exact_logits(oracle, open_engine, piece):
    engine = open_engine(oracle, compute="exact")
    want = expected(oracle)
    for prompt in range(3):
        ids = want[f"prompt_{prompt}_ids"].tolist()
        session = engine.session()
        parts = [session.extend(ids[i : i + piece]) for i in range(0, len(ids), piece)]
        logits = np.concatenate(parts)
        assert logits.shape == (len(ids), engine.spec.vocab_size)
        assert np.abs(logits[-1] - want[f"prompt_{prompt}_last_logits"]).max() <= EXACT_BOUND
        if prompt == 1:
            assert np.abs(logits - want["all_logits"]).max() <= EXACT_BOUND


def test_exact_greedy_tokens_and_decode_logits(oracle, open_engine):
    engine = open_engine(oracle, compute="exact")
    want = expected(oracle)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_end=True)
    for prompt in range(3):
        ids = want[f"prompt_{prompt}_ids"].tolist()
        events = list(engine.session().generate(ids, params))
        tokens = [event.token_id for event in events if event.token_id is not None]
        assert tokens == want[f"prompt_{prompt}_greedy"].tolist()
        assert events[-1].finish_reason == "length"
    session = engine.session()
    session.extend(want["prompt_1_ids"].tolist()[:-1], logits=None)
    chain = [want["prompt_1_ids"].tolist()[-1], *want["prompt_1_greedy"].tolist()[:-1]]
    for token, logits in zip(chain, want["greedy_logits"]):
        assert np.abs(session.extend([token], logits="last")[0] - logits).max() <= EXACT_BOUND


def rerouted(folder, open_engine, ids):
    """Positions at which default mode chooses other experts than exact mode, in any layer."""
    chosen = []
    for compute in ("exact", "bf16"):
        engine = open_engine(folder, compute=compute)
        span = CpuPrefill(engine.model.native, _native.ThreadPool(1), engine.session().cache, ids)
        layers = [span.run_layer(_native.CancelFlag()) for _ in engine.spec.layers]
        chosen.append([np.sort(layer.router_ids_TK, axis=1) for layer in layers])
    return {
        int(position)
        for exact, default in zip(*chosen)
        for position in np.flatnonzero((exact != default).any(axis=1))
    }


def test_default_mode_keeps_clear_choices(oracle, open_engine, capsys):
    """Teacher-forced argmax where the margin is clear, in prefill and in decode.

    A router's near tie that rounding decides the other way moves its position by more than
    rounding (oracle README); no BF16 definition is free of it. Such a flip must sit where the
    routing changed, is printed, and there may be one in a folder.
    """
    engine = open_engine(oracle)
    want = expected(oracle)
    flips = []
    for prompt in range(3):
        ids = want[f"prompt_{prompt}_ids"].tolist()
        greedy = want[f"prompt_{prompt}_greedy"].tolist()
        chain = ids + greedy[:-1]
        logits = engine.session().extend(chain)[len(ids) - 1 :]
        decoded = engine.session()
        decoded.extend(ids[:-1], logits=None)
        rows = np.array([decoded.extend([i], logits="last")[0] for i in chain[len(ids) - 1 :]])
        clear = want[f"prompt_{prompt}_greedy_margin"] >= MARGIN
        for step in np.flatnonzero(clear):
            if {int(logits[step].argmax()), int(rows[step].argmax())} != {greedy[step]}:
                assert len(ids) - 1 + step in rerouted(oracle, open_engine, chain)
                flips.append(f"prompt {prompt}, step {step}")
    if flips:
        with capsys.disabled():
            print(f"\n{oracle.name}: a changed routing flips {', '.join(flips)}")
    assert len(flips) <= 1


def test_default_mode_error(oracle, open_engine):
    """Logits rms within twice transformers' own BF16 error, which meta.json gives for the hidden
    state, relative; logits scale alike."""
    want, facts = expected(oracle), meta(oracle)
    logits = open_engine(oracle).session().extend(want["prompt_1_ids"].tolist())
    rms = float(np.sqrt(np.mean((logits - want["all_logits"]) ** 2)))
    bound = 2 * facts["bf16_compute"]["hidden_rel_rms"] * facts["logits_std"]
    print(f"{oracle.name}: logits rms error {rms:.4f}, bound {bound:.4f}")
    assert rms <= bound


@pytest.mark.parametrize("compute", ["exact", "bf16"])
def test_hidden_states_and_routing(oracle, open_engine, compute, capsys):
    engine = open_engine(oracle, compute=compute)
    want = expected(oracle)
    moe_layers = want["moe_layers"].tolist() if "moe_layers" in want else []
    ids = want["prompt_1_ids"].tolist()
    prefill = CpuPrefill(engine.model.native, _native.ThreadPool(1), engine.session().cache, ids)
    changed = 0
    for layer in range(engine.spec.num_layers):
        chosen_TK = prefill.run_layer(_native.CancelFlag()).router_ids_TK
        if compute == "exact":
            assert np.abs(prefill.hidden_TD - want["hidden"][layer + 1]).max() <= EXACT_BOUND
        assert (chosen_TK.shape[1] > 0) == (layer in moe_layers)
        if layer in moe_layers:
            expected_TK = want["router_ids"][moe_layers.index(layer)]
            differ_TK = np.sort(chosen_TK, axis=1) != np.sort(expected_TK, axis=1)
            changed += int(differ_TK.any(axis=1).sum())
    if moe_layers and compute == "bf16":
        with capsys.disabled():
            decisions = len(ids) * len(moe_layers)
            print(f"\n{oracle.name}: {changed} of {decisions} routings changed by bf16")
    assert changed <= (0 if compute == "exact" else MAX_ROUTING_CHANGES)
