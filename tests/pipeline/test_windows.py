"""Sliding windows bound the cache; a rewind past the slack prefills again."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from oracles import oracle_folder

from moechat import SamplingParams
from moechat.prefill.cpu import CpuPrefill

SLACK_SLOTS = 512  # kSlackSlots of cpp/kv/cache.h
PAGE_SLOTS = 64
GREEDY = SamplingParams(temperature=0, max_tokens=800, ignore_end=True)
NAMES = ["mistral_swa", "gemma3_text", "gpt_oss_bf16"]


@pytest.fixture(params=NAMES)
def engine(request, open_engine):
    return open_engine(oracle_folder(request.param), compute="exact")


def long_talk(engine):
    session = engine.session()
    generator = np.random.default_rng(1)
    prompt = generator.integers(3, engine.spec.vocab_size, 300).tolist()
    for _ in session.generate(prompt, GREEDY):
        pass
    session.extend([5], logits=None)
    return session


def test_window_layers_are_bounded_and_the_others_are_not(engine):
    session = long_talk(engine)
    for number, layer in enumerate(engine.spec.layers):
        held = session.cache.num_slots(number) - session.cache.first_slot(number)
        if layer.window:
            assert layer.window + SLACK_SLOTS <= held
            assert held <= layer.window + SLACK_SLOTS + 2 * PAGE_SLOTS
        else:
            assert held == len(session)


def test_prefill_alone_is_bounded_too(engine):
    session = engine.session()
    generator = np.random.default_rng(3)
    for _ in range(10):
        session.extend(generator.integers(3, engine.spec.vocab_size, 150).tolist(), logits=None)
    for number, layer in enumerate(engine.spec.layers):
        held = session.cache.num_slots(number) - session.cache.first_slot(number)
        assert not layer.window or held <= layer.window + SLACK_SLOTS + 2 * PAGE_SLOTS


def test_a_rewind_within_the_slack_prefills_nothing(engine):
    session = long_talk(engine)
    ids = list(session.timeline.ids)
    kept = len(ids) - 400
    assert session.rewind(kept) == 0
    logits = session.extend(ids[kept : kept + 40])
    fresh = engine.session().extend(ids[: kept + 40])[-40:]
    np.testing.assert_allclose(logits, fresh, atol=1e-4)


@pytest.mark.parametrize("before_the_answer", [0, 1, 40])
def test_a_rewind_to_where_the_answer_began_prefills_nothing(engine, before_the_answer):
    """As templates that drop an answer's thinking from the next prompt need it."""
    session = long_talk(engine)
    ids = list(session.timeline.ids)
    kept = 300 - 1 - before_the_answer
    assert session.rewind(kept) == 0
    logits = session.extend(ids[kept : kept + 40])
    fresh = engine.session().extend(ids[: kept + 40])[-40:]
    np.testing.assert_allclose(logits, fresh, atol=1e-4)


def test_a_rewind_past_the_slack_prefills_again(engine):
    session = long_talk(engine)
    ids = list(session.timeline.ids)
    kept = 450
    assert session.rewind(kept) == kept
    assert len(session) == kept
    logits = session.extend(ids[kept : kept + 40])
    fresh = engine.session().extend(ids[: kept + 40])[-40:]
    np.testing.assert_allclose(logits, fresh, atol=1e-4)


def test_a_cut_prefill_leaves_the_talk_as_it_was(engine, monkeypatch):
    session = long_talk(engine)
    run_layer, layers = CpuPrefill.run_layer, itertools.count()

    def cut_in_the_second_layer(prefill, cancel, window=0):
        if next(layers) == 1:
            session.cancel()
        return run_layer(prefill, cancel, window)

    ids, cached = list(session.timeline.ids), len(session.cache)
    prompt = np.random.default_rng(2).integers(3, engine.spec.vocab_size, 3000).tolist()
    with monkeypatch.context() as patch:
        patch.setattr(CpuPrefill, "run_layer", cut_in_the_second_layer)
        events = list(session.generate(prompt, GREEDY))
    assert events[-1].finish_reason == "cancelled"
    session.rewind(len(ids))
    assert len(session.cache) == cached
    logits = session.extend([7, 8, 9])
    fresh = engine.session().extend([*ids, 7, 8, 9])[-3:]
    np.testing.assert_allclose(logits, fresh, atol=1e-4)
