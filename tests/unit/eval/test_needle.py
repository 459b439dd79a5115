"""Needles: where they are hidden, what crosses, what counts as found."""

from __future__ import annotations

import random
from itertools import islice

import pytest
from fake_engine import FakeEngine, FakeText

from moechat.errors import Usage
from moechat.eval.needle import (
    Filler,
    ask,
    built_in_sentences,
    depths_percent,
    is_found,
    make_trials,
    sentences_of,
)


def test_depths_are_even_and_leave_out_the_ends():
    assert depths_percent(19) == [5.0 * i for i in range(1, 20)]
    assert depths_percent(1) == [50.0]


def test_sentences_are_split_joined_and_each_there_once():
    text = "One two. Three!\nFour\n\nfive? One two.  Six\tseven。八。" + "x" * 400
    assert sentences_of(text) == ["One two.", "Three!", "Four", "five?", "Six seven。", "八。"]
    with pytest.raises(Usage):
        sentences_of("x" * 1000)


def test_the_built_in_sentences_hold_no_number():
    found = built_in_sentences()
    assert len(found) == 120
    assert not any(character.isdigit() for sentence in found for character in sentence)


@pytest.mark.parametrize("length", [100, 700, 3400])
def test_a_trial_is_of_the_wanted_length_and_depth(length):
    text = FakeText()
    filler = Filler(text, built_in_sentences())
    for depth in depths_percent(19):
        trial = filler.trial(length, depth, random.Random(depth))
        ids = [*trial.document_ids, *trial.question_ids]
        assert length - 20 < len(ids) <= length
        words = text.tokenizer.decode(trial.document_ids).split()
        place = words.index(f"{trial.code}.")
        assert place / len(words) == pytest.approx(depth / 100, abs=20 / length)


def test_the_question_is_no_part_of_what_crosses():
    text = FakeText()
    trial = Filler(text, built_in_sentences()).trial(300, 50, random.Random(1))
    document, question = map(text.tokenizer.decode, (trial.document_ids, trial.question_ids))
    assert document.startswith("<bos> <user> ") and f" is {trial.code}. " in document
    name = document.split(f" is {trial.code}.")[0].split()[-1]
    assert question == f"What is the code of {name}? <reply>"
    assert "What" not in document


def test_trials_repeat_for_a_seed_and_differ_for_another():
    def trials(seed, lengths=(100, 200)):
        made = make_trials(FakeText(), lengths, [25.0, 75.0], built_in_sentences(), seed)
        return [(t.length_tokens, t.depth_percent, t.code, len(t.document_ids)) for t in made]

    assert trials(1) == trials(1) and trials(1) != trials(2)
    assert [trial[:2] for trial in trials(1)] == [(100, 25), (100, 75), (200, 25), (200, 75)]
    assert trials(1)[2:] == trials(1, (200,))  # whatever else is measured


def test_sentences_come_again_only_when_all_were_there():
    text = FakeText()
    trial = Filler(text, ["A a a.", "B b b.", "C c c."]).trial(100, 50, random.Random(1))
    words = text.tokenizer.decode(trial.document_ids).split()[2:]
    first = [word for word in words if word in "ABC"]
    rounds = iter(first)
    while len(batch := list(islice(rounds, 3))) == 3:
        assert sorted(batch) == ["A", "B", "C"]


def test_a_length_without_room_for_the_needle_is_an_error():
    with pytest.raises(Usage, match="does not fit"):
        Filler(FakeText(), ["A a."]).trial(10, 50, random.Random(1))


def test_the_question_is_stepped_and_then_answered():
    engine = FakeEngine(answer=lambda session: "The code is 12345.")
    trial = Filler(engine.text, ["A a a."]).trial(60, 50, random.Random(1))
    session = engine.session()
    session.extend(trial.document_ids, logits=None)
    result = ask(session, engine.text, trial)
    assert session.calls[1:] == [
        *(("last", [token_id]) for token_id in trial.question_ids[:-1]),
        ("generate", trial.question_ids[-1:]),
    ]
    assert (result.answer, result.found) == ("The code is 12345.", False)


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("The code of Clara is 48213.", True),
        ("48213", True),
        ("**48213** or 11111", True),
        ("It is 4821.", False),
        ("It is 482130.", False),
        ("11111, not 48213", False),
        ("", False),
    ],
)
def test_the_first_number_of_an_answer_counts(answer, found):
    assert is_found(answer, "48213") == found
