"""A talk resumed from a snapshot goes on bit for bit, whatever its cache holds."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from draft_models import agreeing_folder
from kv_policies import ByLayer, Thinning
from oracles import MINI, SMALL_ORACLE, oracle_folder

from moechat import SamplingParams
from moechat.engine.snapshot import KVSnapshot
from moechat.errors import EngineClosed, PacketRefused, PromptTooLong, SessionBusy
from moechat.kv.policy import make_policy
from moechat.kv.tiers import DROPPED, Tier

TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_end=True)
SAMPLED = SamplingParams(
    temperature=0.9, top_p=0.9, repetition_penalty=1.2, seed=7, max_tokens=TOKENS, ignore_end=True
)
# Latent attention; grouped without windows; windows in all, most and every other layer.
FOLDERS = ["mini", SMALL_ORACLE, "qwen3_moe", "mistral_swa", "gemma3_text", "gpt_oss_mxfp4"]
WINDOWS = ["mistral_swa", "gemma3_text", "gpt_oss_bf16"]
POLICIES = ["native", "int8", "spectrum", "pdtrim", "thinning"]


def folder_of(name):
    return MINI if name == "mini" else oracle_folder(name)


def tokens_of(handle):
    return [event.token_id for event in handle if event.token_id is not None]


def random_ids(engine, count, seed=1):
    return np.random.default_rng(seed).integers(3, engine.spec.vocab_size, count).tolist()


def use(engine, policy):
    layout = engine.kv_policy.layout
    engine.kv_policy = Thinning(0.6) if policy == "thinning" else make_policy(policy, 0.3, layout)


def last_kv(session, count=TOKENS):
    """Bytes of the newest slots of every layer; every position that the layers hold."""
    cache = session.cache
    ends = [cache.num_slots(layer) for layer in range(cache.num_layers)]
    return [
        (cache.read(layer, max(cache.first_slot(layer), end - count), end).tobytes(),
         cache.positions(layer).tobytes())
        for layer, end in enumerate(ends)
    ]  # fmt: skip


def go_on(session, seed):
    """What the next requests give: logits of both kinds of kernels, tokens, KV."""
    engine = session.engine
    prefilled = session.extend(random_ids(engine, 20, seed))
    stepped = [session.extend([token], logits="last") for token in (5, 6, 7)]
    answers = [tokens_of(session.generate([9], params)) for params in (GREEDY, SAMPLED)]
    logits = [array.tobytes() for array in (prefilled, *stepped)]
    return logits, answers, last_kv(session), list(session.timeline.ids)


def through_a_file(session, folder):
    path = folder / "talk.kv"
    session.snapshot().save(path)
    return KVSnapshot.load(path)


@pytest.mark.parametrize("compute", ["bf16", "exact"])
@pytest.mark.parametrize("name", FOLDERS)
def test_it_goes_on_bitwise(name, compute, open_engine, tmp_path):
    engine = open_engine(folder_of(name), compute=compute)
    other = open_engine(folder_of(name), compute=compute, threads=1)
    # Two spans of slots where all stay; where windows are, more than they hold.
    length = (
        650
        if any(layer.window for layer in engine.spec.layers)
        else min(300, engine.spec.context_tokens - 90)
    )
    for policy in POLICIES:
        use(engine, policy)
        use(other, policy)
        session = engine.session()
        tokens_of(session.generate(random_ids(engine, length), GREEDY))
        snapshot = through_a_file(session, tmp_path)
        copies = [other.session(snapshot), engine.session(session.snapshot())]
        want = go_on(session, 2)
        for copy in copies:
            assert len(copy.cache) == length + TOKENS - 1
            assert go_on(copy, 2) == want, policy
            assert copy.last_stats.cached_prompt_tokens == len(copy) - TOKENS - 2
        # The snapshot is what it was, and a snapshot of what was resumed is as good.
        again = other.session(through_a_file(other.session(snapshot), tmp_path))
        assert go_on(again, 2) == want


@pytest.mark.parametrize("name", ["mini", "gpt_oss_mxfp4"])
def test_alone_in_a_batch_and_resumed(name, open_engine, tmp_path):
    """Every session stops halfway, and goes on elsewhere together with the others."""
    engine, other = (open_engine(folder_of(name), threads=threads) for threads in (2, 1))
    prompts = [random_ids(engine, count, seed=count) for count in (3, 40, 90, 200)]
    halves = SamplingParams(temperature=0, max_tokens=2 * TOKENS, ignore_end=True)
    alone = [tokens_of(engine.session().generate(ids, halves)) for ids in prompts]
    sessions = [engine.session() for _ in prompts]
    handles = [session.generate(ids, GREEDY) for session, ids in zip(sessions, prompts)]
    first = [tokens_of(handle) for handle in handles]
    copies = [other.session(through_a_file(session, tmp_path)) for session in sessions]
    second = [tokens_of(handle) for handle in [copy.generate([], GREEDY) for copy in copies]]
    assert [a + b for a, b in zip(first, second)] == alone
    for session, copy in zip(sessions, copies):
        tokens_of(session.generate([], GREEDY))
        assert last_kv(copy) == last_kv(session)
    logits = [session.extend([5], logits="last") for session in [*sessions, *copies]]
    for session, copy in zip(logits[:4], logits[4:]):
        assert session.tobytes() == copy.tobytes()


@pytest.mark.parametrize("share", [0.0, 0.7])
@pytest.mark.parametrize("name", WINDOWS)
def test_rewinds_of_a_long_talk_with_windows(name, share, open_engine, tmp_path):
    engine = open_engine(oracle_folder(name))
    engine.kv_policy = Thinning(share)
    session = engine.session()
    tokens_of(session.generate(random_ids(engine, 300), GREEDY))
    long = SamplingParams(temperature=0, max_tokens=510, ignore_end=True)
    tokens_of(session.generate([5], long))
    assert any(session.cache.first_slot(layer) for layer in range(engine.spec.num_layers))
    for kept in (len(session) - 1, len(session) - 450, 40):  # 40: past every window
        copy = engine.session(through_a_file(session, tmp_path))
        assert copy.rewind(kept) == session.rewind(kept) == (kept if kept == 40 else 0)
        snapshots = [engine.session(through_a_file(copy, tmp_path)), copy]
        want = go_on(session, kept)
        for resumed in snapshots:
            assert go_on(resumed, kept) == want


@pytest.mark.parametrize("name", WINDOWS)
def test_slots_keep_their_place_in_their_span(name, open_engine, tmp_path):
    """Sums over slots are cut at every 128th or 256th: each next token has the same bits."""
    engine = open_engine(oracle_folder(name), compute="exact")
    session = engine.session()
    for count in (600, 290):
        session.extend(random_ids(engine, count), logits=None)
    copies = [engine.session(through_a_file(session, tmp_path)) for _ in range(2)]
    assert session.cache.first_slot(0) % 256 == 64 * 5 % 256
    ids = random_ids(engine, 270, seed=3)
    stepped = [
        np.concatenate([one.extend([token], logits="last") for token in ids])
        for one in (session, copies[0])
    ]
    assert stepped[0].tobytes() == stepped[1].tobytes()
    session.rewind(890)
    assert copies[1].extend(ids).tobytes() == session.extend(ids).tobytes()


@pytest.mark.parametrize("length", [590, 700, 830])  # 0, 128 and 256 slots have left
def test_what_left_the_window_stays_away(length, open_engine, tmp_path):
    engine = open_engine(oracle_folder("mistral_swa"))
    session = engine.session()
    tokens_of(session.generate(random_ids(engine, 300), GREEDY))
    session.extend(random_ids(engine, length - len(session)), logits=None)
    left = session.cache.first_slot(0)
    copy = engine.session(through_a_file(session, tmp_path))
    assert copy.rewind(40) == session.rewind(40) == (40 if left else 0)
    assert go_on(copy, 2) == go_on(session, 2)


def test_all_that_a_window_shows_was_dropped(open_engine, tmp_path):
    engine = open_engine(oracle_folder("mistral_swa"))

    def ends(layer, count):
        tiers = np.full(count, DROPPED, np.uint8)
        tiers[:128] = tiers[-1] = Tier.NATIVE
        return tiers

    session, native = engine.session(), engine.kv_policy
    engine.kv_policy = ByLayer(ends)
    session.extend(random_ids(engine, 800), logits=None)
    engine.kv_policy = native
    assert (session.cache.first_slot(0), session.cache.num_slots(0)) == (128, 129)
    for kept in (800, 500):  # what the window shows of 500 had been dropped, too
        copy = engine.session(through_a_file(session, tmp_path))
        assert len(copy.cache) == 800
        assert copy.rewind(kept) == session.rewind(kept) == 0
    assert go_on(copy, 2) == go_on(session, 2)


@pytest.mark.parametrize("share", [0.0, 0.7])
@pytest.mark.parametrize("answer_tokens", [2, 800])
@pytest.mark.parametrize("name", WINDOWS)
def test_a_rewind_to_where_the_answer_began(name, answer_tokens, share, open_engine, tmp_path):
    """As after thinking. What the window shows there was kept aside, is so later, or is held."""
    engine = open_engine(oracle_folder(name))
    engine.kv_policy = Thinning(share)
    session = engine.session()
    answer = SamplingParams(temperature=0, max_tokens=answer_tokens, ignore_end=True)
    tokens_of(session.generate(random_ids(engine, 300), answer))
    for more in (0, 600):
        snapshot = through_a_file(session, tmp_path)
        copies = [engine.session(snapshot) for _ in range(2)]
        for token in random_ids(engine, more, seed=6):
            for one in (session, *copies):
                one.extend([token], logits="last")
        for layer in range(engine.spec.num_layers):
            places = [one.cache.native.place(layer, True) for one in (session, *copies)]
            assert places[1:] == places[:1] * 2
        assert [one.rewind(280) for one in copies] == [0, 0]
        assert go_on(copies[0], 3) == go_on(copies[1], 3)
    copies[0].rewind(280)
    assert session.rewind(280) == 0
    assert go_on(copies[0], 3) == go_on(session, 3)


@pytest.mark.parametrize("kept", [150, 97, 1, 0])
@pytest.mark.parametrize("name", [SMALL_ORACLE, "gemma3_text"])
def test_after_a_rewind_into_dropped_tokens(name, kept, open_engine, tmp_path):
    engine = open_engine(oracle_folder(name))
    session, native = engine.session(), engine.kv_policy
    engine.kv_policy = Thinning(0.8)
    session.extend(random_ids(engine, 151), logits=None)
    engine.kv_policy = native
    assert session.rewind(kept) == 0
    copy = engine.session(through_a_file(session, tmp_path))
    assert len(copy.cache) == kept
    assert go_on(copy, 2) == go_on(session, 2)


@pytest.mark.parametrize("policy", ["native", "thinning"])
def test_the_draft_layers_cache_is_resumed(policy, open_engine, tmp_path):
    with_drafts = open_engine(agreeing_folder(), speculate=True)
    plain = open_engine(agreeing_folder())
    for engine in (with_drafts, plain):
        use(engine, policy)
    sessions = [engine.session() for engine in (with_drafts, plain)]
    for session in sessions:
        tokens_of(session.generate(random_ids(plain, 100), GREEDY))
    snapshot = through_a_file(sessions[0], tmp_path)
    copy = with_drafts.session(snapshot)
    draft, own = copy.cache.draft, sessions[0].cache.draft
    assert draft.num_slots(0) == own.num_slots(0) > 90
    assert draft.end_position(0) == own.end_position(0)
    held = own.num_slots(0)
    assert draft.read(0, 0, held).tobytes() == own.read(0, 0, held).tobytes()
    assert draft.positions(0, 0, held).tobytes() == own.positions(0, 0, held).tobytes()
    # Without the draft layer's cache, and with it where it is of no use: the same text.
    others = [plain.session(snapshot), with_drafts.session(through_a_file(sessions[1], tmp_path))]
    assert others[0].cache.draft is None and others[1].cache.draft.num_slots(0) == 0
    handles = [s.generate([7], SAMPLED) for s in (*sessions, copy, *others)]
    ends = [(tokens_of(handle), handle.result().stats) for handle in handles]
    assert all(tokens == ends[0][0] for tokens, _ in ends)
    stats = [(end.drafted, end.accepted) for _, end in ends]
    assert stats[2] == stats[0] and stats[0][1] > 0
    assert stats[1] == stats[3] == (0, 0) and stats[4][0] > 0


def test_holes_of_the_draft_layers_cache(open_engine, tmp_path):
    """The last token of an answer leaves one; a rewind may end there."""
    engine = open_engine(agreeing_folder(), speculate=True)
    session = engine.session()
    for _ in range(2):
        tokens_of(session.generate(random_ids(engine, 20), GREEDY))
    whole, ends = session.snapshot(), set()
    for kept in range(26, 40):
        own = engine.session(whole)
        own.rewind(kept)
        copy = engine.session(through_a_file(own, tmp_path))
        drafts = [one.cache.draft for one in (own, copy)]
        held = [(d.num_slots(0), d.end_position(0), d.read(0, 0, d.num_slots(0)).tobytes())
                for d in drafts]  # fmt: skip
        assert held[0] == held[1]
        ends.add(held[0][1] - held[0][0])
    assert len(ends) > 1


def test_a_busy_session_is_refused_and_others_go_on(open_engine):
    """A snapshot is taken between two steps of another session."""
    engine = open_engine(MINI)
    long = SamplingParams(temperature=0, max_tokens=150, ignore_end=True)
    want = tokens_of(engine.session().generate([5, 6, 7], long))
    ready, busy = engine.session(), engine.session()
    ready.extend(random_ids(engine, 60), logits=None)
    handle, got = busy.generate([5, 6, 7], long), []
    with pytest.raises(SessionBusy):
        busy.snapshot()
    reader = threading.Thread(target=lambda: got.extend(tokens_of(handle)))
    reader.start()
    snapshots = [ready.snapshot()]
    while reader.is_alive():
        snapshots.append(engine.session(ready.snapshot()).snapshot())
    reader.join()
    assert got == want and len(snapshots) > 2
    answers = [tokens_of(engine.session(s).generate([8], GREEDY)) for s in snapshots[:3]]
    assert answers == [tokens_of(ready.generate([8], GREEDY))] * 3
    assert tokens_of(engine.session(busy.snapshot()).generate([], GREEDY)) == tokens_of(
        busy.generate([], GREEDY)
    )


def test_an_empty_talk_and_one_without_kv(small_oracle, open_engine, tmp_path):
    engine = open_engine(small_oracle)
    empty = engine.session(through_a_file(engine.session(), tmp_path))
    assert len(empty) == len(empty.cache) == 0
    one = engine.session()
    one.extend([4], logits=None)
    one.rewind(0)
    assert go_on(empty, 2) == go_on(engine.session(through_a_file(one, tmp_path)), 2)


def test_a_cancelled_request_leaves_a_talk_to_resume(small_oracle, open_engine, tmp_path):
    engine = open_engine(small_oracle)
    session = engine.session()
    session.extend([4, 5, 6], logits=None)
    handle = session.generate(random_ids(engine, 60), GREEDY)
    session.cancel()
    list(handle)
    copy = engine.session(through_a_file(session, tmp_path))
    assert copy.timeline.ids == session.timeline.ids
    assert go_on(copy, 2) == go_on(session, 2)


def test_what_is_closed_gives_none(small_oracle, open_engine):
    engine = open_engine(small_oracle)
    session, closed = engine.session(), engine.session()
    snapshot = session.snapshot()
    closed.close()
    with pytest.raises(EngineClosed, match="session is closed"):
        closed.snapshot()
    engine.close()
    with pytest.raises(EngineClosed):
        session.snapshot()
    with pytest.raises(EngineClosed):
        engine.session(snapshot)


def test_an_engine_that_closes_meanwhile_ends_the_wait(small_oracle, open_engine, monkeypatch):
    engine = open_engine(small_oracle)
    session = engine.session()
    monkeypatch.setattr(session.cache, "slots", lambda layer: threading.Event().wait(0.3))
    failures = []

    def take():
        try:
            session.snapshot()
        except EngineClosed as error:
            failures.append(error)

    taker = threading.Thread(target=take)
    taker.start()
    engine.close()
    taker.join(5)
    assert not taker.is_alive() and len(failures) == 1


def test_it_must_fit_the_context(small_oracle, open_engine):
    engine = open_engine(small_oracle)
    session = engine.session()
    session.extend([3] * 50, logits=None)
    assert len(open_engine(small_oracle, context_tokens=50).session(session.snapshot())) == 50
    with pytest.raises(PromptTooLong, match="50 tokens; the limit is 49"):
        open_engine(small_oracle, context_tokens=49).session(session.snapshot())


def test_damage_in_memory_is_found_on_arrival(small_oracle, open_engine):
    engine = open_engine(small_oracle)
    session = engine.session()
    session.extend([3, 4, 5], logits=None)
    snapshot = session.snapshot()
    snapshot.layers[1].packet.payload[0][2, 3] ^= 1
    with pytest.raises(PacketRefused, match=r"layer 1.*checksum"):
        engine.session(snapshot)
    assert go_on(engine.session(session.snapshot()), 2) == go_on(session, 2)
