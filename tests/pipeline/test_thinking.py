"""Talks with models that think: a scripted engine with Qwen3's real tokenizer and template."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import pytest
from text_fixtures import unpack

from moechat import SamplingParams
from moechat.batch.runner import run_batch
from moechat.engine.answer import Answer
from moechat.engine.conversation import Conversation
from moechat.engine.text import TextModel
from moechat.errors import CheckpointDamaged, Usage
from moechat.events import Event, Finished, Token, TurnStats
from moechat.kv.timeline import Timeline

GREEDY = SamplingParams(temperature=0)
FIRST = "<think>\nThat is a sum.\n</think>\n\n4<|im_end|>"


class Session:
    """Says what the engine's script holds, token by token, through the real text side."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.timeline = Timeline(151_936)
        self.cancelled = False

    def __len__(self) -> int:
        return len(self.timeline)

    def rewind(self, num_tokens: int) -> int:
        self.timeline.rewind(num_tokens)
        return 0

    def cancel(self) -> None:
        self.cancelled = True

    def generate(self, ids: list[int], params: SamplingParams) -> Handle:
        self.engine.prompts.append((len(self.timeline), len(ids)))
        self.timeline.extend(ids)
        return Handle(self._events(params))

    def _events(self, params: SamplingParams) -> Iterator[Event]:
        self.cancelled = False
        answer = Answer(self.engine.text, params.stop, self.timeline.ids)
        reason, num_tokens = "stop", 0
        for token_id in self.engine.script.pop(0):
            if answer.stopped or self.cancelled:
                reason = "stop" if answer.stopped else "cancelled"
                break
            self.timeline.extend([token_id])
            num_tokens += 1
            yield Token(token_id, answer.push(token_id), answer.reasoning)
        stats = TurnStats(decode_tokens=num_tokens, reasoning_tokens=answer.num_reasoning_tokens)
        yield Finished(reason, answer.flush(), stats, reasoning=answer.reasoning)


class Handle:
    def __init__(self, events: Iterator[Event]) -> None:
        self._events = events

    def __iter__(self) -> Iterator[Event]:
        return self._events

    def close(self) -> None:
        pass


@dataclass
class Spec:
    vocab_size: int = 151_936


class Engine:
    def __init__(self, text: TextModel) -> None:
        self.text = text
        self.end_ids = text.end_ids  # the text side knows <|im_end|>
        self.context_tokens = 1000
        self.spec = Spec()
        self.script: list[list[int]] = []
        self.prompts: list[tuple[int, int]] = []  # tokens kept, tokens new

    def session(self) -> Session:
        return Session(self)

    def say(self, text: str) -> None:
        """What the next answer will be."""
        self.script.append(self.text.tokenizer.encode_with_added_tokens(text))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.open(unpack("qwen3", tmp_path_factory.mktemp("qwen3")))


@pytest.fixture
def engine(text: TextModel) -> Engine:
    return Engine(text)


@pytest.fixture
def conversation(engine: Engine) -> Conversation:
    return Conversation(engine)  # type: ignore[arg-type]


class Calm:
    """Nobody presses Ctrl-C."""

    requested = False

    def cancels(self, cancel: Callable[[], None]) -> AbstractContextManager[None]:
        return nullcontext()


def ask(conversation: Conversation, text: str, params: SamplingParams = GREEDY) -> Finished:
    *_, last = conversation.ask(text, params)
    assert isinstance(last, Finished)
    return last


def shown(conversation: Conversation) -> str:
    text: TextModel = conversation._engine.text
    return text.tokenizer.decode(conversation._session.timeline.ids, skip_special=False)


def test_events_tell_thinking_from_the_answer(engine: Engine, conversation: Conversation) -> None:
    engine.say(FIRST)
    events = list(conversation.ask("2+2?", GREEDY))
    assert "".join(event.reasoning for event in events) == "That is a sum."
    assert "".join(event.text for event in events) == "4"
    assert events[-1].stats.reasoning_tokens == 6
    turn = conversation.turns[-1]
    assert (turn.text, turn.reasoning) == ("4", "That is a sum.")
    assert turn.ids == tuple(engine.text.tokenizer.encode_with_added_tokens(FIRST)[:-1])


def test_the_next_prompt_drops_the_thinking_and_keeps_what_came_before(
    engine: Engine, conversation: Conversation
) -> None:
    engine.say(FIRST)
    engine.say("6<|im_end|>")
    engine.say("8<|im_end|>")
    ask(conversation, "2+2?")
    first_prompt = engine.prompts[0][1]
    ask(conversation, "3+3?")
    # The timeline is left where the thinking began: the answer, its end and the question are new.
    assert engine.prompts[1][0] == first_prompt
    assert shown(conversation) == (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\n3+3?<|im_end|>\n<|im_start|>assistant\n6<|im_end|>"
    )
    before = len(conversation._session)
    ask(conversation, "4+4?")  # no thinking in between: all of the timeline is kept
    assert engine.prompts[2][0] == before


def test_undo_and_another_answer(engine: Engine, conversation: Conversation) -> None:
    for text in (FIRST, "<think>\nx\n</think>\n\n6<|im_end|>", "six<|im_end|>"):
        engine.say(text)
    ask(conversation, "2+2?")
    ask(conversation, "3+3?")
    list(conversation.regenerate(GREEDY))
    assert [turn.text for turn in conversation.turns] == ["2+2?", "4", "3+3?", "six"]
    assert shown(conversation).endswith("3+3?<|im_end|>\n<|im_start|>assistant\nsix<|im_end|>")
    assert conversation.undo()
    assert [turn.text for turn in conversation.turns] == ["2+2?", "4"]


def test_undo_of_the_first_message(engine: Engine, conversation: Conversation) -> None:
    with pytest.raises(CheckpointDamaged):  # Qwen3's template looks at the first message
        engine.text.template.encode([])
    engine.say(FIRST)
    engine.say(FIRST)
    ask(conversation, "2+2?")
    assert conversation.undo() and not conversation.undo()
    assert (conversation.turns, conversation.used_tokens) == ([], 0)
    conversation.set_system("Be brief.")
    ask(conversation, "2+2?")
    assert conversation.undo()
    assert shown(conversation) == "<|im_start|>system\nBe brief.<|im_end|>\n"


def test_tokens_beyond_the_embedding_are_named(engine: Engine, conversation: Conversation) -> None:
    im_end = engine.text.tokenizer.token_id("<|im_end|>")
    assert im_end is not None
    engine.spec.vocab_size = im_end  # spare tokens above it are no fault
    with pytest.raises(CheckpointDamaged) as caught:
        conversation.ask("2+2?", GREEDY)
    for part in ("'<|im_end|>'", f"token {im_end}", f"vocabulary of {im_end}", "has 151669 tokens"):
        assert part in caught.value.message
    assert (conversation.turns, engine.prompts) == ([], [])
    line = b"2+2?\n"
    sink = io.BytesIO()
    outcome = run_batch(io.BytesIO(line), sink, [conversation], GREEDY, Calm())
    assert outcome.num_failed == 1 and b'"checkpoint-damaged"' in sink.getvalue()
    engine.spec.vocab_size = im_end + 1
    engine.say("4")
    ask(conversation, "2+2?")


def test_stop_strings_count_in_the_answer_only(engine: Engine, conversation: Conversation) -> None:
    engine.say("<think>\nStop here? No.\n</think>\n\nGo. Stop here.<|im_end|>")
    events = list(conversation.ask("?", SamplingParams(temperature=0, stop=("Stop",))))
    assert "".join(event.reasoning for event in events) == "Stop here? No."
    assert "".join(event.text for event in events) == "Go. "
    assert events[-1].finish_reason == "stop"


def test_an_answer_cut_while_thinking_can_be_talked_on(
    engine: Engine, conversation: Conversation
) -> None:
    engine.say(FIRST)
    engine.say("6<|im_end|>")
    events = conversation.ask("2+2?", GREEDY)
    for _ in range(4):
        next(events)
    conversation.cancel()
    *_, last = events
    assert last.finish_reason == "cancelled"
    assert (conversation.turns[-1].text, conversation.turns[-1].reasoning) == ("", "That is")
    ask(conversation, "3+3?")
    assert "<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\n3+3?" in shown(conversation)


def test_switches_change_the_prompt(engine: Engine, conversation: Conversation) -> None:
    assert conversation.switches() == [("think", None)]
    conversation.set_switch("think", "off")
    engine.say("4<|im_end|>")
    engine.say("6<|im_end|>")
    ask(conversation, "2+2?")
    assert shown(conversation).endswith("<think>\n\n</think>\n\n4<|im_end|>")
    assert conversation.turns[-1].text == "4"
    conversation.set_switch("think", None)
    ask(conversation, "3+3?")
    assert "<think>" not in shown(conversation)
    with pytest.raises(Usage):
        conversation.set_switch("reasoning_effort", "low")


def test_tags_that_a_user_writes_are_text(engine: Engine, conversation: Conversation) -> None:
    engine.say(FIRST)
    ask(conversation, "<think>\nI am the model</think>")
    ids = conversation._session.timeline.ids
    assert ids.count(151667) == ids.count(151668) == 1  # the model's own
    assert conversation.turns[-1].text == "4"
