"""Batches against a scripted conversation: order, errors, independence, interrupts."""

import io
import json
import threading
import time
from dataclasses import dataclass, field

import pytest

from moechat.batch.runner import run_batch
from moechat.errors import PromptTooLong
from moechat.events import Finished, PrefillProgress, Token, TurnStats
from moechat.sample.params import SamplingParams

STATS = TurnStats(new_prompt_tokens=3, cached_prompt_tokens=2, decode_tokens=4)


@dataclass
class Echo:
    """Answers with the last message; some prompts fail."""

    asked: list = field(default_factory=list)
    calls: list = field(default_factory=list)
    during: object = None

    def clear(self):
        self.calls.append("clear")

    def cancel(self):
        self.calls.append("cancel")

    def ask_messages(self, turns, params):
        self.calls.append("ask")
        self.asked.append((turns, params))
        text = turns[-1].text
        if text == "long":
            raise PromptTooLong("the prompt has 9 tokens; the limit is 4")
        if text == "bug":
            raise ZeroDivisionError("oops")
        return self._events(text)

    def _events(self, text):
        yield PrefillProgress(1, 1, 5, 0.1)
        for character in text:
            if self.during is not None:
                self.during(character)
            yield Token(1, character)
        if text != "no end":
            yield Finished("stop", "!", STATS)


class NoInterrupt:
    requested = False


def run(text: bytes, conversation=None, interruption=None, **options):
    sink = io.BytesIO()
    outcome = run_batch(
        io.BytesIO(text),
        sink,
        [conversation or Echo()],
        SamplingParams(),
        interruption or NoInterrupt(),
        **options,
    )
    return outcome, [json.loads(line) for line in sink.getvalue().splitlines()]


def test_results_come_in_order_with_the_input_index():
    outcome, results = run(b'a\n\n{"prompt": "b"}\n"c"')
    assert [(r["index"], r["text"]) for r in results] == [(0, "a!"), (2, "b!"), (3, "c!")]
    assert results[0] == {
        "index": 0,
        "text": "a!",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 5, "completion_tokens": 4, "cached_tokens": 2},
    }
    assert (outcome.num_results, outcome.num_failed, outcome.next_line) == (3, 0, 4)


def test_thinking_has_fields_of_its_own():
    class Thinker(Echo):
        def _events(self, text):
            yield Token(1, "", "Let me ")
            yield Token(1, "", "see.")
            yield Token(1, text)
            yield Finished("stop", "", TurnStats(3, 2, decode_tokens=4, reasoning_tokens=2))

    _, (result,) = run(b"a\n", Thinker())
    assert (result["text"], result["reasoning"]) == ("a", "Let me see.")
    assert result["usage"]["completion_tokens"] == 4
    assert result["usage"]["reasoning_tokens"] == 2


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (b"{broken", "bad-line"),
        (b"\xff", "invalid-utf8"),
        (b'""', "prompt-empty"),
        (b"long", "prompt-too-long"),
        (b"bug", "internal-error"),
        (b"no end", "internal-error"),
    ],
)
def test_failed_line_is_an_error_object_and_the_batch_goes_on(line, name):
    outcome, results = run(line + b"\nok\n")
    assert list(results[0]) == ["index", "error"]
    assert results[0]["error"]["name"] == name
    assert results[0]["error"]["message"]
    assert results[1]["text"] == "ok!"
    assert (outcome.num_results, outcome.num_failed) == (2, 1)


def test_each_line_begins_with_nothing_before_it():
    conversation = Echo()
    run(b"a\nb\n", conversation, system="S")
    assert conversation.calls == ["clear", "ask", "clear", "ask"]
    assert [[turn.text for turn in turns] for turns, _ in conversation.asked] == [
        ["S", "a"],
        ["S", "b"],
    ]


def test_answer_is_written_before_the_next_line_is_read():
    sink = io.BytesIO()
    seen = []

    class Source(io.RawIOBase):
        lines = iter((b"a\n", b"b\n", b""))

        def readline(self, size=-1):
            seen.append(sink.getvalue().count(b"\n"))
            return next(self.lines)

    run_batch(Source(), sink, [Echo()], SamplingParams(), NoInterrupt())
    assert seen == [0, 1, 2]


def test_interrupted_line_gives_no_result():
    class Pressed(NoInterrupt):
        pass

    interruption = Pressed()

    def press(character):
        interruption.requested = character == "y"

    outcome, results = run(b"x\ny\nz\n", Echo(during=press), interruption)
    assert [r["index"] for r in results] == [0]
    assert outcome.interrupted and outcome.next_line == 1


def test_interrupt_while_waiting_for_a_line_keeps_what_is_done():
    class Source(io.BytesIO):
        def readline(self, size=-1):
            line = super().readline(size)
            if not line:
                raise KeyboardInterrupt
            return line

    sink = io.BytesIO()
    outcome = run_batch(Source(b"a\n"), sink, [Echo()], SamplingParams(), NoInterrupt())
    assert outcome.interrupted and outcome.next_line == 1
    assert json.loads(sink.getvalue())["text"] == "a!"


def test_closed_sink_ends_the_batch():
    class Sink(io.BytesIO):
        def write(self, content):
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run_batch(io.BytesIO(b"a\n"), Sink(), [Echo()], SamplingParams(), NoInterrupt())


def test_finished_events_are_reported():
    finished = []
    run(b"a\n{broken\nb\n", on_finished=lambda *told: finished.append(told))
    assert [(index, event.stats) for index, event in finished] == [(0, STATS), (2, STATS)]


def test_interrupt_during_a_write_is_after_it():
    interruption = NoInterrupt()

    class Sink(io.BytesIO):
        def flush(self):
            interruption.requested = True

    sink = Sink()
    outcome = run_batch(io.BytesIO(b"a\nb\n"), sink, [Echo()], SamplingParams(), interruption)
    assert sink.getvalue().count(b"\n") == outcome.num_results == outcome.next_line == 1
    assert outcome.interrupted


class Gated(Echo):
    """Answers a prompt only when its gate is open."""

    def __init__(self, gates):
        super().__init__()
        self.gates = gates

    def _events(self, text):
        gate = self.gates.get(text)
        while gate is not None and not gate.wait(0.01) and "cancel" not in self.calls:
            pass
        if "cancel" in self.calls:
            yield Finished("cancelled", "", STATS)
        else:
            yield from super()._events(text)


def test_results_keep_the_order_of_the_lines_whatever_ends_first():
    gate = threading.Event()

    class Last(Gated):
        def ask_messages(self, turns, params):
            if turns[-1].text == "e":
                gate.set()
            return super().ask_messages(turns, params)

    sink = io.BytesIO()
    conversations = [Last({"a": gate}) for _ in range(3)]
    outcome = run_batch(
        io.BytesIO(b"a\nlong\n\nc\nbug\ne\n"),
        sink,
        conversations,
        SamplingParams(),
        NoInterrupt(),
    )
    rows = [json.loads(line) for line in sink.getvalue().splitlines()]
    assert [row["index"] for row in rows] == [0, 1, 3, 4, 5]
    assert [row.get("text") for row in rows] == ["a!", None, "c!", None, "e!"]
    assert (outcome.num_results, outcome.num_failed, outcome.next_line) == (5, 2, 6)


def test_so_many_lines_are_answered_at_once():
    barrier = threading.Barrier(3, timeout=10)

    class Meeting(Echo):
        def _events(self, text):
            barrier.wait()
            yield from super()._events(text)

    sink = io.BytesIO()
    conversations = [Meeting() for _ in range(3)]
    run_batch(io.BytesIO(b"a\nb\nc\n"), sink, conversations, SamplingParams(), NoInterrupt())
    assert [json.loads(line)["text"] for line in sink.getvalue().splitlines()] == ["a!", "b!", "c!"]
    assert [len(conversation.asked) for conversation in conversations] == [1, 1, 1]


def test_interrupt_cancels_all_that_are_under_way_and_drops_what_would_leave_a_hole():
    interruption = NoInterrupt()
    answered = threading.Event()

    class Source(io.BytesIO):
        def readline(self, size=-1):
            line = super().readline(size)
            if not line:
                assert answered.wait(10)
                while not sink.getvalue():
                    time.sleep(0.001)
                interruption.requested = True
                raise KeyboardInterrupt
            return line

    class Watched(Gated):
        def _events(self, text):
            yield from super()._events(text)
            if text == "c":
                answered.set()

    never = threading.Event()
    sink = io.BytesIO()
    conversations = [Watched({"b": never, "d": never}) for _ in range(4)]
    source = Source(b"a\nb\nc\nd\n")
    outcome = run_batch(source, sink, conversations, SamplingParams(), interruption)
    rows = [json.loads(line) for line in sink.getvalue().splitlines()]
    assert [row["index"] for row in rows] == [0]
    assert outcome.interrupted and outcome.next_line == 1
    assert sum("cancel" in conversation.calls for conversation in conversations) >= 2


def test_a_failing_sink_cancels_the_others():
    never = threading.Event()

    class Sink(io.BytesIO):
        def write(self, content):
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run_batch(
            io.BytesIO(b"a\nb\nc\n"),
            Sink(),
            [Gated({"b": never, "c": never}) for _ in range(3)],
            SamplingParams(),
            NoInterrupt(),
        )
