"""The multi-token-prediction layer of deepseek_v3_fp8_odd against float64, in exact mode."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from deepseek_reference import Reference
from oracles import SMALL_ORACLE, expected

from moechat import SamplingParams

BOUND = 1e-3  # as for the main model's logits, see test_oracles.py


@functools.cache
def reference() -> Reference:
    return Reference(SMALL_ORACLE)


def answer(session, ids, num_tokens):
    """Decode greedily; nothing is accepted, so the layer ran for one position a step."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_end=True)
    *_, last = session.generate(ids, params)
    assert (last.stats.drafted, last.stats.accepted) == (num_tokens - 2, 0)


def check_last_draft(engine, session):
    """The layer's last logits, and what they were to attend to."""
    positions = session.cache.draft.positions(0, 0, session.cache.draft.num_slots(0))
    logits = reference().draft_logits(session.timeline.ids, positions)
    assert np.abs(engine.drafter.logits - logits[-1]).max() <= BOUND
    return positions.tolist()


def test_the_reference_computes_the_main_model(small_oracle):
    want = expected(small_oracle)
    ids = want["prompt_1_ids"].tolist()
    assert np.abs(reference().hidden(ids) - want["final_norm"]).max() <= BOUND
    assert np.abs(reference().logits(ids) - want["all_logits"]).max() <= BOUND


@pytest.mark.parametrize("prompt", [0, 1, 2])
@pytest.mark.parametrize("num_tokens", [3, 4, 9, 20])
def test_drafts_after_prefill_and_after_decode(small_oracle, open_engine, prompt, num_tokens):
    engine = open_engine(small_oracle, compute="exact", speculate=True)
    ids = expected(small_oracle)[f"prompt_{prompt}_ids"].tolist()
    session = engine.session()
    answer(session, ids, num_tokens)
    positions = check_last_draft(engine, session)
    assert positions == list(range(len(ids) + num_tokens - 3))


def test_the_layer_goes_on_from_what_is_there(small_oracle, open_engine):
    """Later turns, a rewind, tokens without logits, and tokens stepped without a drafter."""
    engine = open_engine(small_oracle, compute="exact", speculate=True)
    ids = expected(small_oracle)["prompt_2_ids"].tolist()
    session = engine.session()
    answer(session, ids[:9], 6)
    answer(session, ids[9:20], 5)
    assert check_last_draft(engine, session) == [*range(12), *range(14, 28)]
    session.extend(ids[20:30], logits=None)
    session.drafter = None
    answer_without = SamplingParams(temperature=0, max_tokens=7, ignore_end=True)
    *_, last = session.generate([], answer_without)
    assert last.stats.drafted == 0
    session.drafter = engine.drafter
    answer(session, ids[30:33], 4)
    session.rewind(36)
    answer(session, ids[40:50], 5)
    positions = check_last_draft(engine, session)
    assert len(positions) < len(session) - 5
    assert positions[-12:] == list(range(36, 48))
