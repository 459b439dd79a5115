"""Ctrl-C and Ctrl-D in every state of the chat, in a pseudo-terminal."""

from __future__ import annotations

import signal

import pytest

BACK_WITHIN_SECONDS = 0.3


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
    chat.send("slow\r")
    chat.wait_text("w5")
    chat.send("\x03")
    assert chat.wait(lambda: chat.is_ready) < BACK_WITHIN_SECONDS
    assert "[interrupted]" in chat.text
    chat.say("hi", ", 3, ")  # the question, its partial answer, this message


def test_prefill_stops_at_once(open_chat):
    chat = open_chat(plain=True)
    chat.send("prefill\r")
    chat.wait_text("reading 9 tokens: layer")
    chat.send("\x03")
    assert chat.wait(lambda: chat.is_ready) < BACK_WITHIN_SECONDS
    assert "[interrupted]" in chat.text
    assert "not part of the talk" in chat.text
    assert "reading 9 tokens" not in chat.text
    chat.say("hi", 'got ["hi", 1,')


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
