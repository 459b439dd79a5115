"""``moechat run --batch`` with a scripted engine: lines in, objects out, exit codes."""

import json
import os
import signal
import time

import pytest

from moechat.events import Token, TurnStats

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
    result = moechat("run", "mini", "--batch", stdin=b"a\n")
    assert (result.code, result.stderr) == (0, "")
    assert moechat("run", "mini", "--batch", stdin=b"").stdout == ""


@pytest.mark.parametrize("options", [(), ("--stats", "line")])
def test_a_terminal_sees_how_far_a_batch_is_and_what_came_out(moechat, tmp_path, options):
    path = tmp_path / "lines"
    path.write_bytes(b"a\n{broken\nc")
    result = moechat("batch", str(path), *options, terminals="e")
    assert result.code == 6
    shown = result.stderr.split("\r")
    assert shown[1] == "0 of 3 lines, 0 failed"
    assert "\n" not in shown[1] and "3 lines, 1 failed; 6 tokens in " in shown[-1]
    assert result.stderr.count("index 0; prompt 3 new") == len(options) // 2
    assert result.stderr.count("lines failed") == 0


def test_no_line_is_between_the_results_on_a_terminal(moechat):
    result = moechat("run", "mini", "--batch", stdin=b"a\nb\n", terminals="oe")
    assert result.stderr.startswith("2 lines, 0 failed; 6 tokens in ")
    assert "\r" not in result.stderr and result.stderr.count("\n") == 1


def test_json_counters_name_their_line_and_nothing_is_mixed_in(moechat):
    moechat.engine.finish_reason = "length"
    arguments = ("run", "mini", "--batch", "--stats", "json")
    result = moechat(*arguments, stdin=b"a\n{broken\nb\n", terminals="e")
    *each, last = [json.loads(line) for line in result.stderr.split("\r")[-1].splitlines()]
    assert [row["index"] for row in each] == [0, 2]
    assert {row["finish_reason"] for row in each} == {"length"}
    assert (last["results"], last["failed"], last["decode_tokens"]) == (3, 1, 6)


def test_dropped_tokens_and_a_budget_too_small_are_told(moechat):
    moechat.engine.stats = TurnStats(3, kv_bytes=60, kv_native_bytes=100, kv_dropped_fraction=0.4)
    batch = ("run", "mini", "--batch", "--kv", "snapkv")
    told = moechat(*batch, stdin=b"a\nb\n").stderr
    assert "2 lines" in told and "40.0 % of the prompt's tokens were dropped" in told
    assert "budget" not in told
    told = moechat(*batch, "--kv-budget", "0.5", stdin=b"a\n").stderr
    assert "1 line" in told and "--kv-budget 0.5 was too little: 0.6 was sent" in told
    one = moechat("run", "mini", "--kv", "snapkv", "--kv-budget", "0.5", "q")
    assert one.stderr.count("\n") == 1 and "dropped" in one.stderr and "0.6 was sent" in one.stderr
    assert "0.6" not in moechat("run", "mini", "--kv", "snapkv", "--kv-budget", "0.6", "q").stderr


def test_a_name_comes_back_with_the_result(moechat):
    stdin = (
        b'{"prompt": "a", "custom_id": "q-1"}\n{"id": 7, "prompt": ""}\n{"id": [1], "prompt": "a"}'
    )
    rows = list(map(json.loads, moechat("run", "mini", "--batch", stdin=stdin).stdout.splitlines()))
    assert list(rows[0])[:3] == ["index", "custom_id", "text"] and rows[0]["custom_id"] == "q-1"
    assert (rows[1]["id"], rows[1]["error"]["name"]) == (7, "prompt-empty")
    assert "id" not in rows[2] and "id is neither" in rows[2]["error"]["message"]


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


def test_an_unknown_model_of_a_batch_has_no_advice_on_questions(moechat, tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"a\n")
    for arguments in [("batch", str(path), "--model", "mimi"), ("run", "mimi", "--batch")]:
        result = moechat(*arguments, stdin=b"a\n")
        assert result.code == 3 and "did you mean mini" in result.stderr
        assert "question" not in result.stderr


def test_batch_verb_says_how_to_go_on_with_its_file(moechat, tmp_path):
    path = tmp_path / "my questions"
    path.write_bytes(b"a\nb\nc\n")
    interrupt_at_b(moechat)
    result = moechat("batch", str(path), "--concurrency", "1")
    assert result.code == 130
    assert f"`tail -n +2 '{path}' | moechat batch - …`" in result.stderr
