"""``moechat run --batch`` with a scripted engine: lines in, objects out, exit codes."""

import json
import os
import signal
import time

import pytest

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
    assert sorted(moechat.engine.asked) == ["What day?", "What is 7 plus 8?"]
    assert moechat.engine.systems[:4] == [""] * 4
    assert sorted(moechat.engine.systems[4:]) == [["F"], ["S"]]
    assert result.stderr == "1 of 3 lines failed\n"


def test_batch_without_failures_is_0(moechat):
    result = moechat("run", "mini", "--batch", stdin=b"a\n", terminals="e")
    assert (result.code, result.stderr) == (0, "")
    assert moechat("run", "mini", "--batch", stdin=b"").stdout == ""


def interrupt_at_b(moechat):
    """From now on the line "b" interrupts the process before it is answered."""

    def script(text):
        if text == "b":
            os.kill(os.getpid(), signal.SIGINT)
            while not moechat.engine.cancelled:
                time.sleep(0.001)
        yield Token(5, text)

    moechat.engine.script = script


def test_batch_interrupted_says_where_to_go_on(moechat):
    interrupt_at_b(moechat)
    result = moechat("run", "mini", "--batch", "--concurrency", "1", stdin=b"a\nb\nc\n")
    assert result.code == 130
    assert [json.loads(line)["text"] for line in result.stdout.splitlines()] == ["a"]
    assert "tail -n +2" in result.stderr


def test_batch_needs_stdin_and_no_prompt(moechat):
    assert moechat("run", "mini", "--batch", terminals="ie").code == 2
    result = moechat("run", "mini", "--batch", "q", stdin=b"a\n")
    assert result.code == 2 and "--batch" in result.stderr


def test_so_many_conversations_at_once(moechat):
    result = moechat("run", "mini", "--batch", "--concurrency", "3", stdin=b"a\nb\nc\nd\ne\n")
    assert [json.loads(line)["index"] for line in result.stdout.splitlines()] == [0, 1, 2, 3, 4]
    assert moechat.engine.systems.count("") == 3


def test_more_than_fit_is_refused_and_the_default_is_cut(moechat):
    moechat.engine.fit = 2
    result = moechat("run", "mini", "--batch", "--concurrency", "3", stdin=b"a\n")
    assert result.code == 4 and result.stdout == ""
    assert "3 conversations at once do not fit; 2 would" in result.stderr
    moechat.engine.systems.clear()
    result = moechat("run", "mini", "--batch", stdin=b"a\n")
    assert (result.code, moechat.engine.systems.count("")) == (0, 2)
    assert result.stderr == "2 lines at once: no more conversations fit the memory\n"
    moechat.engine.fit = 0
    assert moechat("run", "mini", "--batch", stdin=b"a\n").code == 4


@pytest.mark.parametrize("value", ["0", "65", "x"])
def test_concurrency_out_of_range(moechat, value):
    result = moechat("run", "mini", "--batch", "--concurrency", value, stdin=b"a\n")
    assert result.code == 2 and "1 to 64" in result.stderr


def test_concurrency_without_a_batch(moechat):
    result = moechat("run", "mini", "--concurrency", "2", "q")
    assert result.code == 2 and "--batch" in result.stderr


def test_batch_verb_reads_a_file_or_stdin(moechat, tmp_path):
    path = tmp_path / "questions of mine.jsonl"
    path.write_bytes(b"a\nb\n")
    result = moechat("batch", str(path), "--temperature", "0", "--system", "S")
    assert [json.loads(line)["index"] for line in result.stdout.splitlines()] == [0, 1]
    assert (result.code, result.stderr) == (0, "")
    assert moechat.engine.systems[4:] == [["S"], ["S"]]
    result = moechat("batch", "-", stdin=b"a\n")
    assert json.loads(result.stdout)["index"] == 0
    assert moechat("batch", "-", terminals="i").code == 2
    result = moechat("batch", str(tmp_path / "none.jsonl"))
    assert result.code == 3 and "none.jsonl" in result.stderr
    assert moechat("batch").code == 2


def test_batch_verb_says_how_to_go_on_with_its_file(moechat, tmp_path):
    path = tmp_path / "my questions"
    path.write_bytes(b"a\nb\nc\n")
    interrupt_at_b(moechat)
    result = moechat("batch", str(path), "--concurrency", "1")
    assert result.code == 130
    assert f"`tail -n +2 '{path}' | moechat batch - …`" in result.stderr
