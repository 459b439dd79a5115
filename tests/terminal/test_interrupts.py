"""Ctrl-C and Ctrl-D in every state of the chat, in a pseudo-terminal."""

from __future__ import annotations

import signal

import pytest

BACK_WITHIN_SECONDS = 0.3


def interrupt(chat, message: str, sign: str) -> float:
    """Ctrl-C after ``sign`` is seen; the best time to the next prompt of up to three trials."""
    times: list[float] = []
    while len(times) < 3 and min(times, default=1.0) >= BACK_WITHIN_SECONDS:
        known = len(chat.lines)
        chat.send(message + "\r")
        chat.wait(lambda known=known: sign in chat.since(known))
        chat.send("\x03")
        times.append(chat.wait(lambda: chat.is_ready))
    return min(times)


def test_idle_with_text_clears_it(open_chat):
    chat = open_chat(plain=True)
    chat.send("some text")
    chat.wait_text("> some text")
    chat.send("\x03")
    chat.wait(lambda: chat.is_ready)
    chat.say("hi", 'got ["hi", 1,')


def test_idle_and_empty_hints_then_leaves(open_chat):
    chat = open_chat()
    chat.send("\x03")
    chat.wait_text("Ctrl-C again")
    chat.wait(lambda: chat.is_ready)
    chat.send("\x03")
    assert chat.exit_code() == 130


def test_control_d_leaves_an_empty_line_only(open_chat):
    chat = open_chat(plain=True)
    chat.send("ab\x01\x04")
    chat.wait(lambda: chat.lines[-1] == "> b")
    chat.send("\x0b")
    chat.wait(lambda: chat.is_ready)
    assert not chat.echoes
    chat.send("\x04")
    assert chat.exit_code() == 0
    assert chat.echoes


@pytest.mark.parametrize("plain", [True, False])
def test_decoding_stops_at_once_and_keeps_the_part(open_chat, plain):
    chat = open_chat(plain=plain)
    assert interrupt(chat, "slow", "w5") < BACK_WITHIN_SECONDS
    assert "[interrupted]" in chat.text
    turns = 2 * chat.text.count("> slow") + 1  # questions, partial answers, this message
    chat.say("hi", f", {turns}, ")


def test_prefill_stops_at_once(open_chat):
    chat = open_chat(plain=True)
    assert interrupt(chat, "prefill", "reading 9 tokens: layer") < BACK_WITHIN_SECONDS
    assert "[interrupted]" in chat.text
    assert "the talk is as before" in chat.text
    assert "reading 9 tokens" not in chat.text
    chat.say("hi", 'got ["hi", 1,')


def test_an_interrupt_before_the_engine_works_is_not_lost(open_chat):
    chat = open_chat(plain=True)
    chat.send("late\r")
    chat.wait_text("encoding")
    chat.send("\x03")
    chat.wait_text("[interrupted]")
    assert "w9 " not in chat.text


def test_second_interrupt_leaves_even_if_the_engine_hangs(open_chat):
    chat = open_chat(plain=True)
    chat.send("hang\r")
    chat.wait_text("hanging")
    chat.send("\x03")
    chat.wait_text("hanging on")
    chat.send("\x03")
    assert chat.exit_code() == 130
    assert chat.echoes
    assert chat.bytes.endswith(b"\x1b[?2004l")


def test_a_signal_at_the_prompt_is_like_the_key(open_chat):
    chat = open_chat()
    chat.child.kill(signal.SIGINT)
    chat.wait_text("Ctrl-C again")
    chat.wait(lambda: chat.is_ready)


@pytest.mark.parametrize("message", ["", "slow"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_that_ends_the_process_leaves_the_terminal_as_it_was(open_chat, message, number):
    chat = open_chat()
    if message:
        chat.send(message + "\r")
        chat.wait_text("w5")
    assert not chat.echoes
    chat.child.kill(number)
    chat.wait_end()
    assert chat.child.signalstatus == number
    assert chat.echoes
    assert chat.bytes.endswith(b"\x1b[?2004l")
