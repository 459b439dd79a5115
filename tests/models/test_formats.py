"""Formats that no oracle folder has, against the same function in plain numbers."""

from __future__ import annotations

import numpy as np
import pytest
from oracle_variants import VARIANTS, variant
from oracles import expected, oracle_folder

from moechat import SamplingParams

EXACT_BOUND = 1e-3
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_end=True)
IDS = np.random.default_rng(5).integers(3, 300, 70).tolist()


def logits_and_tokens(engine):
    session = engine.session()
    logits = [session.extend(IDS[:40]), session.extend(IDS[40:47]), session.extend(IDS[47:])]
    events = engine.session().generate(IDS, GREEDY)
    return np.concatenate(logits), [e.token_id for e in events if e.token_id is not None]


@pytest.mark.parametrize("label", sorted(VARIANTS))
def test_exact_mode_equals_the_dequantised_twin(label, open_engine):
    folder, twin = variant(label)
    logits, tokens = logits_and_tokens(open_engine(folder, compute="exact"))
    wanted, wanted_tokens = logits_and_tokens(open_engine(twin, compute="exact"))
    assert np.abs(logits - wanted).max() <= EXACT_BOUND
    assert tokens == wanted_tokens


@pytest.mark.parametrize("label", sorted(VARIANTS))
def test_default_mode_stays_near(label, open_engine):
    """Both round the same inputs; other summation orders may move a rounding or a near tie."""
    folder, twin = variant(label)
    logits, _ = logits_and_tokens(open_engine(folder))
    wanted, _ = logits_and_tokens(open_engine(twin, compute="exact"))
    typical = np.sqrt(np.median(np.square(logits - wanted).mean(axis=1)))
    print(f"{label}: rms of the middle position {typical:.4f}")
    assert typical <= 0.03 * wanted.std()


def test_the_f32_variant_gives_the_oracles_own_logits(open_engine):
    folder, _ = variant("qwen3_moe-f32")
    want = expected(oracle_folder("qwen3_moe"))
    logits = open_engine(folder, compute="exact").session().extend(want["prompt_1_ids"].tolist())
    assert np.abs(logits - want["all_logits"]).max() <= EXACT_BOUND
