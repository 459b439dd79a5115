"""``moechat run --batch`` with a scripted engine: lines in, objects out, exit codes."""

import json
import os
import signal

from moechat.events import Token

THINKING = [Token(5, "", "Hm."), Token(6, "Oslo.")]


def test_thinking_in_a_batch(moechat):
    moechat.engine.script = lambda text: THINKING
    (row,) = map(json.loads, moechat("run", "mini", "--batch", stdin=b"a\n").stdout.splitlines())
    assert (row["text"], row["reasoning"]) == ("Oslo.", "Hm.")


def test_batch_gives_an_object_a_line_and_code_6(moechat):
    stdin = b'What day?\n\n{"prompt": "What is 7 plus 8?", "system": "S"}\n{broken\n'
    result = moechat("run", "mini", "--batch", "--system", "F", stdin=stdin)
    assert result.code == 6
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["index"] for row in rows] == [0, 2, 3]
    assert rows[0]["text"] == "Oslo." and rows[2]["error"]["name"] == "bad-line"
    assert moechat.engine.asked == ["What day?", "What is 7 plus 8?"]
    assert moechat.engine.systems == ["", ["F"], ["S"]]
    assert result.stderr == "1 of 3 lines failed\n"


def test_batch_without_failures_is_0(moechat):
    result = moechat("run", "mini", "--batch", stdin=b"a\n", terminals="e")
    assert (result.code, result.stderr) == (0, "")
    assert moechat("run", "mini", "--batch", stdin=b"").stdout == ""


def test_batch_interrupted_says_where_to_go_on(moechat):
    def interrupted(text):
        if text == "b":
            os.kill(os.getpid(), signal.SIGINT)
        yield Token(5, text)

    moechat.engine.script = interrupted
    result = moechat("run", "mini", "--batch", stdin=b"a\nb\nc\n")
    assert result.code == 130
    assert [json.loads(line)["text"] for line in result.stdout.splitlines()] == ["a"]
    assert "tail -n +2" in result.stderr


def test_batch_needs_stdin_and_no_prompt(moechat):
    assert moechat("run", "mini", "--batch", terminals="ie").code == 2
    result = moechat("run", "mini", "--batch", "q", stdin=b"a\n")
    assert result.code == 2 and "--batch" in result.stderr
