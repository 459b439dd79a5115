"""Tokens that a policy drops: slot and position differ, layers hold different numbers of slots."""

from __future__ import annotations

import time

import numpy as np
import pytest
from kv_policies import ByLayer, Thinning
from oracles import oracle_folder

from moechat import SamplingParams, _native
from moechat.decode.step import DecodeStep, StepRow
from moechat.kv.packet import native_packet
from moechat.kv.tiers import DROPPED, Tier

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_end=True)


def tokens_of(handle):
    return [event.token_id for event in handle if event.token_id is not None]


def random_ids(engine, count, seed=1):
    return np.random.default_rng(seed).integers(3, engine.spec.vocab_size, count).tolist()


def thinned(engine, ids, share=0.6):
    """A session whose ``ids`` were prefilled with most tokens dropped; what follows is native."""
    session, policy = engine.session(), engine.kv_policy
    engine.kv_policy = Thinning(share)
    session.extend(ids, logits=None)
    engine.kv_policy = policy
    return session


def stepped(session, ids):
    """Logits of ids, each by a decode step."""
    return np.concatenate([session.extend([token], logits="last") for token in ids])


@pytest.fixture
def engine(pipeline_oracle, open_engine):
    return open_engine(pipeline_oracle, compute="exact")


def test_layers_hold_what_was_kept_at_its_positions(engine):
    ids = random_ids(engine, 200)
    session, full = thinned(engine, ids), engine.session()
    full.extend(ids, logits=None)
    cache = session.cache
    assert len(cache) == len(session) == 200
    counts = set()
    for layer in range(cache.num_layers):
        (kept,) = np.nonzero(Thinning(0.6).tiers(layer, 0, 200) != DROPPED)
        kept = kept[kept >= full.cache.first_slot(layer)]
        slots = cache.num_slots(layer) - cache.first_slot(layer)
        np.testing.assert_array_equal(cache.positions(layer)[-len(kept) :], kept)
        assert slots < 200
        counts.add(slots)
        rows = cache.read(layer, cache.num_slots(layer) - 1, cache.num_slots(layer))
        assert rows.tobytes() == full.cache.read(layer, 199, 200).tobytes()
    assert len(counts) > 1


def test_prefill_and_decode_agree_after_dropped_tokens(engine):
    ids, more = random_ids(engine, 150), random_ids(engine, 24, seed=2)
    prefilled = thinned(engine, ids).extend(more)
    np.testing.assert_allclose(stepped(thinned(engine, ids), more), prefilled, atol=1e-4)
    whole = engine.session().extend([*ids, *more])[-len(more) :]
    assert np.abs(whole - prefilled).max() > 1e-3  # dropping did something


@pytest.mark.parametrize("kept", [150, 97, 1, 0])
def test_a_rewind_into_dropped_tokens_goes_on_from_there(engine, kept):
    ids, more = random_ids(engine, 151), random_ids(engine, 12, seed=2)
    one, other = thinned(engine, ids), thinned(engine, ids)
    assert one.rewind(kept) == other.rewind(kept) == 0
    assert len(one.cache) == kept
    assert all(
        (one.cache.positions(layer) < kept).all() and one.cache.num_tokens(layer) == kept
        for layer in range(one.cache.num_layers)
    )
    np.testing.assert_allclose(stepped(one, more), other.extend(more), atol=1e-4)
    assert one.rewind(kept) == 0
    assert len(tokens_of(one.generate([5], GREEDY))) == 16


def test_several_spans_each_dropping(engine):
    ids = random_ids(engine, 180)
    one, other = engine.session(), engine.session()
    for session in (one, other):
        engine.kv_policy = Thinning(0.5)
        for first in range(0, 180, 60):
            session.extend(ids[first : first + 60], logits=None)
    engine.kv_policy = Thinning(0.0)
    more = random_ids(engine, 12, seed=2)
    np.testing.assert_allclose(stepped(one, more), other.extend(more), atol=1e-4)


def test_window_layers_do_not_miss_what_left_their_window(open_engine):
    """Windows count positions: without the tokens before, the rest gives the same logits."""
    engine = open_engine(oracle_folder("mistral_swa"), compute="exact")
    windows = [layer.window for layer in engine.spec.layers]
    assert all(windows)

    def outside(layer, num_tokens):
        tiers = np.full(num_tokens, Tier.NATIVE, np.uint8)
        tiers[: num_tokens - windows[layer]] = DROPPED
        return tiers

    ids, more = random_ids(engine, 200), random_ids(engine, 10, seed=2)
    whole = engine.session().extend([*ids, *more])[-len(more) :]
    engine.kv_policy = ByLayer(outside)
    one, other = engine.session(), engine.session()
    one.extend(ids, logits=None)
    other.extend(ids, logits=None)
    assert one.cache.num_slots(0) == windows[0]
    engine.kv_policy = Thinning(0.0)
    np.testing.assert_allclose(one.extend(more), whole, atol=1e-4)
    np.testing.assert_allclose(stepped(other, more), whole, atol=1e-4)


@pytest.mark.parametrize("name", ["mistral_swa", "gemma3_text", "gpt_oss_bf16"])
def test_rewinds_of_a_long_talk_with_windows(name, open_engine):
    engine = open_engine(oracle_folder(name), compute="exact")
    ids = random_ids(engine, 300)
    long_answer = SamplingParams(temperature=0, max_tokens=800, ignore_end=True)
    sessions = [thinned(engine, ids[:-1], share=0.8) for _ in range(2)]
    for session in sessions:
        tokens_of(session.generate(ids[-1:], long_answer))
    timeline, more = list(sessions[0].timeline.ids), random_ids(engine, 8, seed=2)
    # within the slack; where the answer began; into the dropped tokens shortly before it
    for kept in (len(timeline) - 400, 299, 280):
        assert [session.rewind(kept) for session in sessions] == [0, 0]
        np.testing.assert_allclose(stepped(sessions[0], more), sessions[1].extend(more), atol=1e-4)


def test_a_snapshot_goes_on_bitwise(pipeline_oracle, open_engine):
    engine = open_engine(pipeline_oracle)
    session = thinned(engine, random_ids(engine, 150))
    copy = engine.session()
    copy.timeline.extend(session.timeline.ids)
    for layer in range(engine.spec.num_layers):
        cache = session.cache
        rows = cache.read(layer, cache.first_slot(layer), cache.num_slots(layer))
        packet = native_packet(copy.cache.session, 0, layer, cache.positions(layer), rows)
        assert engine.decode.channel.send_packet(packet, lambda: False)
    deadline = time.monotonic() + 5
    while len(copy.cache) < 150 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert tokens_of(copy.generate([7], GREEDY)) == tokens_of(session.generate([7], GREEDY))
    assert copy.last_stats.cached_prompt_tokens == 150
    layer = engine.spec.num_layers - 1
    ends = [s.cache.num_slots(layer) for s in (copy, session)]
    rows = [s.cache.read(layer, end - 5, end) for s, end in zip((copy, session), ends)]
    assert rows[0].tobytes() == rows[1].tobytes()


def test_rows_with_dropped_tokens_are_batch_invariant(pipeline_oracle, open_engine):
    engine = open_engine(pipeline_oracle)
    lengths = [40, 90, 150]

    def logits(threads, together):
        step = DecodeStep(engine.model.native, _native.ThreadPool(threads))
        caches = [thinned(engine, random_ids(engine, n, seed=n)).cache for n in lengths]
        steps = []
        for token in (5, 6, 7):
            rows = [StepRow(cache, [token + i]) for i, cache in enumerate(caches)]
            batches = [rows] if together else [[row] for row in rows]
            steps += [out for batch in batches for out in step.run(batch)]
        return np.concatenate(steps)

    alone = logits(1, together=False)
    assert logits(2, together=True).tobytes() == alone.tobytes()
    assert logits(3, together=True).tobytes() == alone.tobytes()


def test_the_last_token_must_stay(small_oracle, open_engine):
    engine = open_engine(small_oracle)
    engine.kv_policy = ByLayer(lambda layer, count: np.full(count, DROPPED, np.uint8))
    session = engine.session()
    with pytest.raises(ValueError, match="last token"):
        session.extend([1, 2, 3], logits=None)
    assert len(session) == len(session.cache) == 0


def test_the_draft_layer_crosses_whole(small_oracle, open_engine):
    engine = open_engine(small_oracle, speculate=True)
    ids = random_ids(engine, 60)
    session = thinned(engine, ids)
    assert session.cache.draft.num_slots(0) == 59
    plain = open_engine(small_oracle)
    want = tokens_of(thinned(plain, ids).generate([7], GREEDY))
    assert tokens_of(session.generate([7], GREEDY)) == want
    assert session.rewind(31) == 0
    assert session.cache.draft.end_position(0) == 30
