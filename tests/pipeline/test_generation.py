"""A generation whose steps run elsewhere: `advance` does what the decode loop does."""

from __future__ import annotations

import numpy as np
import pytest

from moechat import _native
from moechat.decode.step import DecodeStep, StepRow
from moechat.engine.loading import load_model
from moechat.kv.cache import KVCache

PROMPT = [7, 30, 11, 52]


class Answer:
    """One session with the prompt in its cache, and its generation."""

    def __init__(self, model, step, number, max_tokens=20, context=1000, end_ids=(), **sampling):
        self.cache = KVCache(number, model.spec, "bf16")
        step.run([StepRow(self.cache, PROMPT)])
        self.queue, self.cancel = _native.TokenQueue(), _native.CancelFlag()
        defaults = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": number,
                    "repetition_penalty": 1.0, "presence_penalty": 0.0}  # fmt: skip
        sampler = _native.Sampler(vocab=model.spec.vocab_size, **{**defaults, **sampling})
        self.generation = _native.Generation(
            model.native, self.cache.native, sampler, self.queue, self.cancel,
            5, len(PROMPT), max_tokens, context, list(end_ids),
        )  # fmt: skip

    def tokens(self):
        return [token for token, _ in self.queue.pop(0)[0]]

    def end(self):
        generation = self.generation
        return generation.finish_reason, generation.position, generation.token, self.tokens()


@pytest.fixture
def model(small_oracle):
    return load_model(small_oracle, "bf16")


@pytest.fixture
def step(model):
    return DecodeStep(model.native, _native.ThreadPool(2))


def loop(step, answer):
    """The answer's end, decoded by the native loop."""
    while not answer.generation.finish_reason:
        _native.generate(step.native, step.model, [answer.generation], _native.CancelFlag())
    return answer.end()


def elsewhere(step, answer):
    """The same, stepped by the caller."""
    generation = answer.generation
    while generation.goes_on():
        (logits,) = step.run([StepRow(answer.cache, [generation.token])])
        went_on = generation.advance(logits[0])
        assert went_on == (generation.finish_reason == "")
    return answer.end()


SETTINGS = [
    {},
    {"temperature": 1.3, "top_p": 0.9, "seed": 3},
    {"temperature": 0.8, "repetition_penalty": 1.4, "presence_penalty": 0.5},
    {"max_tokens": 1},
    {"context": len(PROMPT) + 6},
    {"context": len(PROMPT) + 1},
    {"temperature": 1.5, "end_ids": range(0, 1000, 4), "max_tokens": 50},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_it_ends_as_the_loop_does(model, step, settings):
    expected = loop(step, Answer(model, step, 0, **settings))
    reason, position, _, tokens = elsewhere(step, Answer(model, step, 0, **settings))
    assert (reason, position) == expected[:2] and tokens == expected[3]
    assert reason == ("stop" if "end_ids" in settings else "context" if "context" in settings
                      else "length")  # fmt: skip
    assert position == len(PROMPT) + len(tokens)


def test_the_loop_and_the_caller_take_turns(model, step):
    *_, expected = loop(step, Answer(model, step, 0))
    answer = Answer(model, step, 0)
    generation, flag = answer.generation, _native.CancelFlag()
    while generation.goes_on():
        if generation.position % 2:
            _native.generate(step.native, step.model, [generation], flag, 1)
        else:
            (logits,) = step.run([StepRow(answer.cache, [generation.token])])
            generation.advance(logits[0])
    assert answer.tokens() == expected


@pytest.mark.parametrize("bad", [np.nan, np.inf, "layer"])
def test_values_that_are_not_finite_end_it(model, step, bad):
    answer = Answer(model, step, 0)
    generation = answer.generation
    (logits,) = step.run([StepRow(answer.cache, [5])])
    if bad == "layer":
        assert not generation.advance(logits[0], 1)
    else:
        logits[0, -1] = bad
        assert not generation.advance(logits[0])
    name, message = generation.failure
    assert name == "non-finite-logits"
    assert message.endswith("model.layers.1" if bad == "layer" else "the output head")
    assert generation.finish_reason == "failed" and not generation.goes_on()
    assert len(answer.cache) == len(PROMPT) and answer.tokens() == []


def test_cancel_ends_it_before_the_next_step(model, step):
    answer = Answer(model, step, 0)
    assert answer.generation.goes_on()
    answer.cancel.raise_()
    assert not answer.generation.goes_on()
    assert answer.generation.finish_reason == "cancelled"
    with pytest.raises(_native.NativeError, match="has finished"):
        answer.generation.advance(np.zeros(model.spec.vocab_size, np.float32))


def test_a_full_queue_and_other_shapes_are_refused(model, step):
    answer = Answer(model, step, 0, max_tokens=1000)
    generation = answer.generation
    logits = np.zeros(model.spec.vocab_size, np.float32)
    for wrong in (logits[1:], logits[None]):
        with pytest.raises(_native.NativeError, match="logits"):
            generation.advance(wrong)
    for room in range(64, 0, -1):
        assert generation.queue_room == room
        assert generation.advance(logits)
    position = generation.position
    with pytest.raises(_native.NativeError, match="queue is full"):
        generation.advance(logits)
    assert generation.position == position and generation.finish_reason == ""
    assert answer.tokens() == [0] * 64 and generation.queue_room == 64
