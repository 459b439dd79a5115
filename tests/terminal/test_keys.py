"""Keys, paste, history and completion of the editor, in a pseudo-terminal."""

from __future__ import annotations


def test_welcome_calls_it_a_demonstration_and_offers_three_things(open_chat):
    chat = open_chat()
    words = " ".join(chat.text.split())
    assert "mini is a demonstration" in words
    for example in ("What is the capital of Norway?", "about a fox.", "My name is Lily."):
        assert example in words


def test_new_lines_and_paste_make_one_message(open_chat):
    chat = open_chat(plain=True)
    chat.send("one\x1b\rtwo\nthree")
    chat.wait_text("three")
    chat.say("", r'got ["one\ntwo\nthree", 1, ')
    chat.send("\x1b[200~a\rb\r\nc\nd\x1b[201~")
    chat.wait_text("  d")
    assert chat.text.count("got") == 1
    chat.say("", r'got ["a\nb\nc\nd", 3, ')


def test_wide_characters_and_bad_bytes(open_chat):
    chat = open_chat(plain=True)
    chat.say("漢字 👍 é", "got")
    assert '["漢字 👍 é"' in chat.bytes.decode()
    chat.child.send(b"x\xff y\r")
    chat.wait_text('got ["x')
    assert "x� y" in chat.text.split("got")[-1]


def test_blank_lines_are_not_sent(open_chat):
    chat = open_chat(plain=True)
    chat.say("  ")
    chat.say("hi", 'got ["hi", 1,')


def test_paste_while_answering_waits_as_one_message(open_chat):
    chat = open_chat(plain=True)
    chat.send("brief\r")
    chat.wait_text("b3 ")
    assert chat.bytes.rindex(b"\x1b[?2004h") > chat.bytes.rindex(b"\x1b[?2004l")
    chat.send("\x1b[200~p\rq\x1b[201~")
    chat.wait_text("> p\n  q")
    chat.say("", r'got ["p\nq", 3,')


def test_a_message_typed_while_answering_is_sent_after_the_answer(open_chat):
    chat = open_chat(plain=True)
    chat.send("brief\r")
    chat.wait_text("b3 ")
    chat.send("next\r")
    chat.wait_text('got ["next", 3,')


def test_tab_completes_commands(open_chat):
    chat = open_chat()
    chat.send("/he\t")
    chat.wait_text("> /help")
    chat.send("\r")
    chat.wait_text("/regen")
    chat.send("/und\tx")  # not valid yet
    chat.wait_text("> /undx")


def test_history_is_kept_between_runs_and_searched(open_chat, tmp_path):
    chat = open_chat(plain=True)
    chat.say("first thing", "got")
    chat.say("second", "got")
    chat.send("\x04")
    assert chat.exit_code() == 0
    assert "+first thing" in (tmp_path / "state" / "history").read_text()
    chat = open_chat(plain=True)
    chat.send("\x12thing")
    chat.wait_text("first thing")
    chat.send("\r")
    chat.say("", 'got ["first thing", 1,')


def test_no_history_writes_nothing(open_chat, tmp_path):
    chat = open_chat(history=False)
    chat.say("secret", "got")
    chat.send("\x04")
    assert chat.exit_code() == 0
    assert list(tmp_path.rglob("*")) == []


def test_dumb_terminal(open_chat):
    chat = open_chat(env={"TERM": "dumb"})
    chat.say("hi **x**", "got")
    assert '["hi **x**"' in chat.text
    assert b"\x1b[3" not in chat.bytes and b"\x1b[1m" not in chat.bytes
    chat.send("\x04")
    assert chat.exit_code() == 0


def test_history_that_cannot_be_kept_is_told_once(open_chat, tmp_path):
    (tmp_path / "state").write_text("a file where a folder should be")
    chat = open_chat(plain=True)
    chat.say("one", "got")
    words = " ".join(chat.text.split())
    assert "what you type is not kept for the next chat:" in words
    assert f"{tmp_path}/state/history cannot be used (File exists)." in words
    assert "set MOECHAT_HOME to another folder, or start with --no-history." in words
    chat.say("two", "got")
    assert chat.text.count("is not kept") == 1


def test_history_that_cannot_be_read_is_told(open_chat, tmp_path):
    (tmp_path / "state" / "history").mkdir(parents=True)
    chat = open_chat(plain=True)
    chat.say("one", "got")
    assert "is not kept" in chat.text


def test_a_dumb_terminal_sends_nothing_unseen(open_chat):
    chat = open_chat(env={"TERM": "dumb"})
    chat.say("hello", "got")
    for keys in ("\x1b[A", "\x10", "\x12", "\x1b[B", "\t"):
        chat.send(keys)
    chat.say("x", 'got ["x", 3,')
