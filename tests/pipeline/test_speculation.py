"""Speculation: whatever is drafted, the text is that of decoding one token at a time."""

from __future__ import annotations

import time

import gguf_convert
import numpy as np
import pytest
from draft_models import DRAFT, agreeing_folder, write_folder
from oracle_formats import Stored
from oracles import MINI, oracle_folder

from moechat import Engine, SamplingParams, _native
from moechat.errors import BadParameter, CheckpointDamaged, MoechatError

PROMPT = list(range(5, 20))
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_end=True)


def read(handle):
    """Token ids and the last event of an answer."""
    *events, last = handle
    return [event.token_id for event in events if event.token_id is not None], last


def speculating(open_engine, folder=None):
    return open_engine(folder or agreeing_folder(), threads=1, speculate=True)


def plain(open_engine, folder=None, **settings):
    return open_engine(folder or agreeing_folder(), threads=1, **settings)


def scripted(session, text, hit_rate, position=15):  # len(PROMPT)
    """Have the session draft from the ``text`` that will stand at ``position``."""
    vocab = session.timeline.vocab_size
    session.drafter = _native.ScriptedDrafter(text, position, hit_rate, 5, vocab)


def various(seed):
    """Sampling parameters that differ in everything, by seed."""
    return SamplingParams(
        temperature=(0, 0.3, 0.7, 1.0, 1.5)[seed % 5],
        top_p=(1.0, 0.9)[seed // 5 % 2],
        repetition_penalty=(1.0, 1.3)[seed // 10 % 2],
        presence_penalty=(0.0, 0.8)[seed // 20 % 2],
        seed=seed,
        max_tokens=24 + seed % 5,
        ignore_end=seed % 3 > 0,
    )


def test_200_seeds_give_the_same_text(open_engine):
    without, with_layer = plain(open_engine), speculating(open_engine)
    drafted, accepted = np.zeros(2), np.zeros(2)
    for seed in range(200):
        text, end = read(without.session().generate(PROMPT, various(seed)))
        sessions = with_layer.session(), without.session()
        scripted(sessions[1], text, 0.5)
        for i, session in enumerate(sessions):
            same, last = read(session.generate(PROMPT, various(seed)))
            assert same == text, (seed, i)
            assert last.finish_reason == end.finish_reason
            assert len(session.cache) == len(session) - 1
            drafted[i] += last.stats.drafted
            accepted[i] += last.stats.accepted
    assert (drafted > 2000).all()
    assert (0.25 * drafted < accepted).all() and (accepted < 0.75 * drafted).all()


def test_exact_mode_and_several_threads(open_engine):
    for settings in ({"compute": "exact"}, {"threads": 2}):
        folder = agreeing_folder()
        with_drafts = open_engine(folder, speculate=True, **settings)
        without = open_engine(folder, **settings)
        for seed in range(20):
            text, _ = read(without.session().generate(PROMPT, various(seed)))
            assert read(with_drafts.session().generate(PROMPT, various(seed)))[0] == text


@pytest.mark.parametrize("hit_rate", [0.0, 1.0])
@pytest.mark.parametrize("max_tokens", range(1, 8))
def test_max_tokens_on_and_beside_a_draft(open_engine, hit_rate, max_tokens):
    engine = plain(open_engine)
    text, _ = read(engine.session().generate(PROMPT, GREEDY))
    session = engine.session()
    scripted(session, text, hit_rate)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_end=True)
    tokens, last = read(session.generate(PROMPT, params))
    assert tokens == text[:max_tokens]
    assert last.finish_reason == "length"
    # The first step has no draft. With hits, a step then gives two tokens; the last token is never
    # worth a draft, as nothing follows it.
    drafted = (max_tokens - 1) // 2 if hit_rate else max(max_tokens - 2, 0)
    assert last.stats.drafted == drafted
    assert last.stats.accepted == drafted * hit_rate
    assert len(session.cache) == len(session) - 1


@pytest.mark.parametrize("hit_rate", [0.0, 0.5, 1.0])
def test_the_context_limit(open_engine, hit_rate):
    unlimited = SamplingParams(temperature=0, ignore_end=True)
    text, _ = read(plain(open_engine).session().generate(PROMPT, GREEDY))
    for limit in range(len(PROMPT) + 1, len(PROMPT) + 7):
        session = plain(open_engine, context_tokens=limit).session()
        scripted(session, text, hit_rate)
        tokens, last = read(session.generate(PROMPT, unlimited))
        assert tokens == text[: limit - len(PROMPT)]
        assert last.finish_reason == "context"


@pytest.mark.parametrize("hit_rate", [0.0, 0.5, 1.0])
def test_an_end_token_where_a_draft_is_right(open_engine, hit_rate):
    engine = open_engine(MINI)
    greeting = [0, 3, 1204, 5, 4]
    params = SamplingParams(temperature=0, max_tokens=40)
    text, end = read(engine.session().generate(greeting, params))
    assert (text[-1], end.finish_reason) == (1, "stop")
    session = engine.session()
    scripted(session, text, hit_rate, len(greeting))
    tokens, last = read(session.generate(greeting, params))
    assert tokens == text
    assert last.finish_reason == "stop"
    assert last.stats.drafted > 0
    assert len(session.cache) == len(session) - 1


def test_cancel_then_go_on(open_engine):
    endless = SamplingParams(temperature=1.0, seed=3, max_tokens=150, ignore_end=True)
    text, _ = read(plain(open_engine).session().generate(PROMPT, endless))
    engine = speculating(open_engine)
    for stop_after in (1, 2, 3, 7, 30):
        session = engine.session()
        tokens = []
        for event in session.generate(PROMPT, endless):
            if event.token_id is not None:
                tokens.append(event.token_id)
            if len(tokens) == stop_after:
                session.cancel()
        assert event.finish_reason == "cancelled"
        assert tokens == text[: len(tokens)]
        assert session.timeline.ids == PROMPT + tokens
        assert len(session.cache) <= len(session)
        assert read(session.generate([], endless))[0][:100] == text[len(tokens) :][:100]


def test_rewind_and_later_turns(open_engine):
    engines = plain(open_engine), speculating(open_engine)
    sessions = [engine.session() for engine in engines]
    for turn in range(6):
        params = SamplingParams(temperature=0.8, seed=turn, max_tokens=20, ignore_end=True)
        new = [3 + turn, 40, 41 + turn] if turn else PROMPT
        texts = [read(session.generate(new, params))[0] for session in sessions]
        assert texts[0] == texts[1]
        if turn % 2:
            for session in sessions:
                session.rewind(len(session) - 7 - turn)


def test_two_sessions_step_together(open_engine):
    engine = speculating(open_engine)
    prompts = PROMPT, [70, 3, 9]
    params = [SamplingParams(temperature=0.7, seed=s, max_tokens=60) for s in range(2)]
    alone = [read(plain(open_engine).session().generate(p, q))[0] for p, q in zip(prompts, params)]
    for drafters in (("layer", "layer"), ("layer", "scripted"), ("scripted", None)):
        sessions = [engine.session() for _ in prompts]
        for session, drafter, text, prompt in zip(sessions, drafters, alone, prompts):
            if drafter == "scripted":
                scripted(session, text, 0.5, len(prompt))
            elif drafter is None:
                session.drafter = None
        handles = [s.generate(p, q) for s, p, q in zip(sessions, prompts, params)]
        ended = [read(handle) for handle in handles]
        assert [tokens for tokens, _ in ended] == alone
        for (_, last), drafter in zip(ended, drafters):
            assert (last.stats.accepted > 0) == (drafter is not None)


def test_more_rows_than_a_step_takes_at_once(open_engine):
    """Ten sessions with a draft each are 20 rows; a step takes 16, and cuts a session in two."""
    engine = plain(open_engine)
    prompts = [[20 + i, 90 - i, 3] for i in range(10)]
    alone = [read(engine.session().generate(prompt, various(3)))[0] for prompt in prompts]
    sessions = [engine.session() for _ in prompts]
    for session, text in zip(sessions, alone):
        scripted(session, text, 0.8, 3)
    handles = [s.generate(prompt, various(3)) for s, prompt in zip(sessions, prompts)]
    assert [read(handle)[0] for handle in handles] == alone


def test_a_slow_reader_holds_decode_at_the_same_place(open_engine):
    long = SamplingParams(temperature=0, max_tokens=200, ignore_end=True)
    engine = plain(open_engine)
    text, _ = read(engine.session().generate(PROMPT, long))
    session = engine.session()
    scripted(session, text, 1.0)
    handle = session.generate(PROMPT, long)
    time.sleep(0.5)  # decode fills the queue of 64 and waits
    assert len(session.cache) == len(PROMPT) + 64 - 1
    assert read(handle)[0] == text


def test_a_wrong_draft_that_gives_nan(open_engine):
    """Without speculation its token is never stepped, so its row must not fail the answer."""
    text, _ = read(plain(open_engine).session().generate(PROMPT, GREEDY))
    poison = (text[5] + 1) % 320  # what a scripted drafter takes for the sixth token
    assert poison not in (*text, *PROMPT)

    def poison_embedding(tensors):
        rows = tensors["model.embed_tokens.weight"].array.copy()
        rows[poison] = np.nan
        tensors["model.embed_tokens.weight"] = Stored("F32", rows)

    session = plain(open_engine, write_folder("poisoned", poison_embedding)).session()
    scripted(session, text, 0.0)
    tokens, last = read(session.generate(PROMPT, GREEDY))
    assert tokens == text
    assert last.stats.drafted == 24 - 3  # as always but for the one that was dropped


def test_a_draft_layer_of_nan_drafts_nothing(open_engine):
    text, _ = read(plain(open_engine).session().generate(PROMPT, GREEDY))

    def spoil(tensors):
        name = DRAFT + "hnorm.weight"
        tensors[name] = Stored("F32", np.full_like(tensors[name].array, np.nan))

    session = speculating(open_engine, write_folder("spoiled", spoil)).session()
    tokens, last = read(session.generate(PROMPT, GREEDY))
    assert tokens == text
    assert (last.stats.drafted, session.cache.draft.num_slots(0)) == (0, 0)


def test_without_speculation_nothing_of_the_layer_is_used(open_engine):
    engine = plain(open_engine)
    assert engine.drafter is None
    session = engine.session()
    assert session.cache.draft is None
    assert read(session.generate(PROMPT, GREEDY))[1].stats.drafted == 0
    with pytest.raises(_native.NativeError, match="no multi-token-prediction layer"):
        _native.MtpDrafter(engine.model.native, _native.ThreadPool(1))


def test_a_drafter_of_another_model_is_refused(open_engine):
    """Its tokens could lie outside the vocabulary, its layer's inputs be of another width."""
    engine, other = speculating(open_engine), speculating(open_engine)
    vocab = engine.spec.vocab_size
    for drafter in (_native.ScriptedDrafter([vocab], 0, 1.0, 5, vocab + 1), other.drafter):
        session = engine.session()
        session.drafter = drafter
        with pytest.raises(MoechatError, match="another model"):
            read(session.generate(PROMPT, GREEDY))
        session.drafter = engine.drafter
        assert read(session.generate(PROMPT, GREEDY))[1].finish_reason == "length"


def test_models_without_such_a_layer_are_refused(tmp_path):
    with pytest.raises(BadParameter, match="it has no multi-token-prediction layer"):
        Engine.open(oracle_folder("deepseek_v3_bf16"), speculate=True)

    def leave_out(tensors):
        for name in [name for name in tensors if name.startswith(DRAFT)]:
            del tensors[name]

    with pytest.raises(BadParameter, match="its files leave out"):
        Engine.open(write_folder("left-out", leave_out), speculate=True)

    def damage(tensors):
        del tensors[DRAFT + "hnorm.weight"]

    with pytest.raises(CheckpointDamaged, match=r"missing.*layers\.2\.hnorm"):
        Engine.open(write_folder("damaged", damage), speculate=True)
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_convert.convert_folder(agreeing_folder(), "F32"))
    with pytest.raises(BadParameter, match="GGUF"):
        Engine.open(path, speculate=True)
