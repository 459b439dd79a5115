"""Slash commands and errors, in a pseudo-terminal."""

from __future__ import annotations

import pytest


def test_help_lists_every_command(open_chat):
    chat = open_chat()
    chat.say("/help")
    for name in ("/help", "/exit", "/clear", "/system", "/set", "/stats", "/regen", "/undo"):
        assert f"  {name} " in chat.text


def test_unknown_slash_is_an_error_and_double_slash_is_text(open_chat):
    chat = open_chat(plain=True)
    chat.say("/exitnow", "[usage]")
    assert "got" not in chat.text
    chat.say("/exit now", "takes no argument")
    chat.say("//exit", 'got ["/exit", 1,')
    chat.say("/clear", "forgotten")
    chat.say("/undo", "needs a message first")
    chat.say("/regen", "needs a message first")
    chat.send("/exit\r")
    assert chat.exit_code() == 0


def test_system_set_regen_undo_clear(open_chat):
    chat = open_chat(plain=True, stats="none")
    chat.say("/system", "no system text")
    chat.say("/system Be brief.", "system: Be brief.")
    chat.say("hi", 'got ["hi", 1, "Be brief.", 0.5, false]')
    chat.say("/regen", 'got ["hi", 1, "Be brief.", 0.5, true]')
    chat.say("/undo", "forgotten")
    chat.say("a", 'got ["a", 1,')
    chat.say("/clear", "system text stays")
    chat.say("b", 'got ["b", 1, "Be brief.",')
    chat.say("/set temperature 0.25", "0.25")
    chat.say("c", 'got ["c", 3, "Be brief.", 0.25,')
    chat.say("/system none", "no system text")
    chat.say("d", 'got ["d", 5, "",')


def test_set_alone_shows_origins_and_refuses_nonsense(open_chat):
    chat = open_chat()
    chat.say("/set top-k 40", "40")
    chat.say("/set")
    rows = [line.split() for line in chat.lines]
    assert ["temperature", "0.5", "flag"] in rows
    assert ["top_p", "0.9", "model"] in rows
    assert ["min_p", "0.0", "default"] in rows
    assert ["top_k", "40", "set"] in rows
    chat.say("/set temperature hot", "[bad-parameter]")
    chat.say("/set temperature -1", "[bad-parameter]")
    chat.say("/set warmth 1", "there is no setting")
    chat.say("/set seed", "a name and a value")


def test_too_long_message_changes_nothing_and_stays_in_history(open_chat):
    chat = open_chat(plain=True)
    chat.say("hi", 'got ["hi", 1,')
    chat.say("toolong text", "[prompt-too-long]")
    words = " ".join(chat.text.split())
    assert "has 123 tokens; the limit is 100" in words
    assert "/clear or /undo or a start with a larger --ctx (up to 4096)" in words
    chat.send("\x1b[A")
    chat.wait(lambda: chat.lines[-1] == "> toolong text")
    chat.send("\x03")
    chat.wait(lambda: chat.is_ready)
    chat.say("on", 'got ["on", 3,')


def test_errors_in_a_turn_do_not_end_the_chat(open_chat):
    chat = open_chat(plain=True)
    chat.say("nan", "error: layer 3 gave NaN. [non-finite-logits]")
    chat.say("crash", "internal error: RuntimeError: script [/INST] broke (run with --debug")
    assert "Traceback" not in chat.text
    chat.say("hi", "got")


def test_debug_shows_the_traceback(open_chat):
    chat = open_chat(plain=True, debug=True)
    chat.say("crash", "internal error")
    assert "Traceback" in chat.text


def test_stats_and_cut(open_chat):
    chat = open_chat(plain=True)
    chat.say("cut", "cut at 1 tokens by the max_tokens limit")
    words = " ".join(chat.text.split())
    assert "7 new + 3 cached tokens" in words and "seed 42" in words
    chat.say("/stats")
    rows = {
        name: figures for name, _, figures in (line.strip().partition("  ") for line in chat.lines)
    }
    assert rows["context"].strip() == "20 of 100 tokens used"
    assert rows["first token"] == "0.10 s" and rows["answer"].strip() == "1 tokens, 10.0 tok/s"


def test_no_color_gives_raw_text(open_chat):
    chat = open_chat(env={"NO_COLOR": "1"})
    chat.say("**x**", '["**x**"')


def test_markup_and_escapes_in_an_answer_are_text(open_chat):
    chat = open_chat()
    chat.say("hostile", "a[i] [bold] list[int] [/INST] ␛[31m end")
    assert b"\x1b[31m end" not in chat.bytes


@pytest.mark.parametrize("columns", [80, 50, 30])
def test_no_word_of_the_programs_own_is_cut(open_chat, columns):
    chat = open_chat(plain=True, size=(columns, 24))
    chat.say("cut", "42")
    for line in ("/help", "/stats", "/set", "/set warmth 1", "/nosuch", "toolong", "crash"):
        chat.say(line)
    words = " ".join(chat.text.split())
    for text in (
        "show or set the system text; none removes it",
        "stop the answer, or clear the line; twice: leave at once",
        "7 new + 3 cached tokens, 70 tok/s",
        "context 20 of 100 tokens used",
        "repetition_penalty 1.0 default",
        "[cut at 1 tokens by the max_tokens limit]",
        "there is no setting 'warmth'. Settings: temperature,",
        "there is no command '/nosuch'. /help lists them;",
        "What helps: /clear or /undo or a start with a larger --ctx (up to 4096).",
        "(run with --debug for the traceback)",
    ):
        assert text in words
    own = [line for line in chat.lines if not line.startswith("got ")]
    assert all(len(line) < columns for line in own)
