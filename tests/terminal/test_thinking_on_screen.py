"""What a model thinks before it answers: how it is shown, and where it is not."""

from __future__ import annotations

import io
import json

import pytest
from fakes import HOSTILE
from streams import Terminal

from moechat.events import Finished, Token, TurnStats
from moechat.terminal.sinks import PlainSink
from moechat.terminal.stats_text import cut_note
from moechat.terminal.thinking_printer import ThinkingPrinter

STATS = TurnStats(20, 5, 0.5, 0.6, 12, 0.25, seed=7, reasoning_tokens=4)
EVENTS = [Token(1, "", "hm"), Token(1, "", " so"), Token(1, "Os", ""), Token(1, "lo.")]
SHOWN = HOSTILE.replace("\x1b", "␛")


def test_it_is_dim_and_the_answer_is_not(open_chat):
    chat = open_chat()
    chat.say("think", "The answer.")
    assert chat.dim_text == f"Let me\nsee: {SHOWN}"
    at = chat.lines.index("Let me")
    assert chat.lines[at : at + 5] == ["Let me", "", f"see: {SHOWN}", "", "The answer."]
    assert "answer 5 tokens (3 of thinking)" in chat.text
    assert b"\x1b[31m end" not in chat.bytes


@pytest.mark.parametrize("options", [{"plain": True}, {"env": {"NO_COLOR": "1"}}])
def test_without_escapes_lines_say_what_it_is(open_chat, options):
    chat = open_chat(**options)
    chat.say("think", "The **answer**.")
    at = chat.lines.index("[thinking]")
    assert chat.lines[at:][:6] == [
        "[thinking]",
        "Let me",
        "",
        f"see: {SHOWN}",
        "[end of thinking]",
        "",
    ]
    assert chat.dim_text == "" and b"\x1b[2m" not in chat.bytes


def test_it_can_be_interrupted(open_chat):
    chat = open_chat()
    chat.send("ponder\r")
    chat.wait_text("p5")
    chat.send("\x03")
    chat.wait(lambda: chat.is_ready)
    assert "[interrupted while the model was thinking]" in chat.text
    known = len(chat.lines)
    chat.say("hi", "got")
    assert "got" not in chat.dim_text and chat.since(known).count("got") == 1


def test_thinking_alone_is_said_to_be_no_answer(open_chat):
    chat = open_chat()
    chat.say("only-think", "[the model thought and gave no answer]")


def test_the_switch_in_a_chat(open_chat):
    chat = open_chat(switches={"think": "off"})
    chat.say("/set")
    assert ["think", "off", "flag"] in [line.split() for line in chat.lines]
    chat.say("/set think on", "set")
    assert ["think", "on", "set"] in [line.split() for line in chat.lines]
    chat.say("/set think default", "flag")
    chat.say("/set think maybe", "[bad-parameter]")
    chat.say("/set reasoning-effort low", "[usage]")


def test_the_switch_without_a_flag_is_the_models(open_chat):
    chat = open_chat()
    chat.say("/set")
    assert ["think", "default", "model"] in [line.split() for line in chat.lines]


def run(thinking=None, events=EVENTS, stats="none"):
    out, err = io.StringIO(), Terminal()
    sink = PlainSink(out, err, stats=stats, thinking=thinking and ThinkingPrinter(err, dim=True))
    sink.consume([*events, Finished("stop", "", STATS)])
    return out.getvalue(), err.getvalue()


def test_stdout_never_holds_it():
    assert run() == ("Oslo.\n", "")
    assert run(thinking=True) == ("Oslo.\n", "\x1b[2mhm\x1b[0m\x1b[2m so\x1b[0m\n\n")
    assert run(events=EVENTS[2:], thinking=True) == ("Oslo.\n", "")


def test_thinking_alone_on_a_pipe():
    assert run(events=EVENTS[:2])[0] == "\n"
    assert "gave no answer" in run(events=EVENTS[:2])[1]


def test_an_error_while_thinking_ends_its_line():
    def events():
        yield EVENTS[0]
        raise OSError

    out, err = io.StringIO(), Terminal()
    with pytest.raises(OSError):
        PlainSink(out, err, thinking=ThinkingPrinter(err, dim=True)).consume(events())
    assert (out.getvalue(), err.getvalue()) == ("", "\x1b[2mhm\x1b[0m\n\n")


def test_counters():
    assert "answer 12 tokens (4 of thinking), 48.0 tok/s" in " ".join(run(stats="line")[1].split())
    assert json.loads(run(stats="json")[1])["reasoning_tokens"] == 4


@pytest.mark.parametrize(
    ("reason", "note"),
    [
        ("length", "cut at 12 tokens by the max_tokens limit while the model was thinking"),
        ("context", "cut while the model was thinking: the context of 64 tokens is full"),
        ("cancelled", "interrupted while the model was thinking"),
        ("stop", "the model thought and gave no answer"),
    ],
)
def test_a_cut_inside_the_thinking_says_so(reason, note):
    finished = Finished(reason, "", STATS)
    assert cut_note(finished, 64, has_text=False) == note
    assert "think" not in cut_note(finished, 64)
    never = Finished(reason, "", TurnStats(1, 0))
    assert "thinking" not in cut_note(never, 64, has_text=False)
