"""Perplexity of files: every token once, windows and chats apart."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from fake_engine import FakeEngine, FakeSession

from moechat.errors import Usage
from moechat.eval.ppl import PIECE_TOKENS, Perplexity, measure_perplexity
from moechat.eval.texts import Source
from moechat.messages import Turn

SHARE = math.exp(5) / (math.exp(5) + 499)  # what a fake session gives the token that it expects
REST = 1 / (math.exp(5) + 499)


def measure(engine, source, window=2048, limit=None):
    found = Perplexity()
    measure_perplexity(engine, source, window, limit, found, lambda line: None)
    return found


def words(count):
    return " ".join(f"w{number}" for number in range(count))


def test_a_text_is_scored_in_windows_behind_the_first_token():
    engine = FakeEngine()
    found = measure(engine, Source(text=words(60)), window=21)
    assert (found.unit, found.num_windows, found.total.tokens) == ("window", 3, 59)
    # New words get rising ids, each the one that the fake expects.
    assert found.total.perplexity == pytest.approx(1 / SHARE)
    (session,) = engine.sessions
    starts = [call for call in session.calls if call[0] is None]
    assert starts == [(None, [0])] * 3 and session.closed


def test_long_windows_are_read_in_pieces():
    engine = FakeEngine()
    engine.text.bos = False
    found = measure(engine, Source(text=words(PIECE_TOKENS + 50)))
    pieces = [len(ids) for logits, ids in engine.sessions[0].calls if logits == "all"]
    assert pieces == [PIECE_TOKENS, 49] and found.total.tokens == PIECE_TOKENS + 49
    assert found.total.perplexity == pytest.approx(1 / SHARE)


@pytest.mark.parametrize(("vocab", "pieces"), [(1000, [600]), (1 << 19, [256, 256, 88])])
def test_a_gpu_reads_as_much_at_once_as_its_logits_allow(vocab, pieces):
    engine = FakeEngine()
    engine.text.bos = False
    engine.prefill_choice.gpu = object()
    engine.spec = SimpleNamespace(vocab_size=vocab)
    engine.session = lambda: made.append(Wide(engine)) or made[-1]
    made = []
    measure(engine, Source(text=words(601)))
    assert [len(ids) for logits, ids in made[0].calls if logits == "all"] == pieces


class Wide(FakeSession):
    vocab = 700


def test_chats_are_scored_whole_and_alone():
    engine = FakeEngine(context_tokens=8)
    chat = [Turn("user", "a b"), Turn("assistant", "c")]  # <bos> <user> a b <reply> c
    long = [Turn("user", words(10))]
    found = measure(engine, Source(conversations=(chat, long, chat)))
    assert (found.unit, found.num_windows, found.too_long) == ("chat", 2, 1)
    assert found.total.tokens == 10
    likely, all_of_them = 2, 5  # <bos> <user>, a b; the others are surprises
    nats = -likely * math.log(SHARE) - (all_of_them - likely) * math.log(REST)
    assert found.windows[0].nats == pytest.approx(nats)
    assert [call for call in engine.sessions[0].calls if call[0] == "rewind"] == [("rewind", 0)] * 2


@pytest.mark.parametrize("bos", [True, False])
def test_a_window_counts_as_many_tokens_as_it_has_in_every_model(bos):
    engine = FakeEngine(context_tokens=40)
    engine.text.bos = bos
    assert measure(engine, Source(text=words(60)), window=20, limit=2).total.tokens == 40
    assert measure(engine, Source(text=words(60)), window=20).total.tokens == 59
    room = 40 - bos
    assert measure(engine, Source(text=words(60)), window=None, limit=1).window_tokens == room
    assert measure(engine, Source(text=words(60)), window=room, limit=1).total.tokens == room
    with pytest.raises(Usage, match=f"--window cannot be {room + 1}: the context has 40"):
        measure(engine, Source(text=words(60)), window=room + 1)


def test_a_limit_of_windows():
    assert measure(FakeEngine(), Source(text=words(60)), window=21, limit=2).num_windows == 2


def test_a_text_without_a_second_token_is_an_error():
    for source in (Source(text="one"), Source(conversations=([Turn("user", words(5000))],))):
        with pytest.raises(Usage, match="nothing to measure"):
            measure(FakeEngine(), source)
