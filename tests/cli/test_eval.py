"""``moechat eval`` as a process, with mini."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from xml.etree import ElementTree

import pytest

from moechat.eval.needle import built_in_sentences

TIMEOUT_SECONDS = 60
CHATS = [[["What is the capital of Norway?", "The capital of Norway is Oslo."]]] * 3


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(" ".join(built_in_sentences()))
    return path


def test_ppl_of_a_text_and_of_chats(run, text, tmp_path):
    code, stdout, stderr = run(
        "eval", "ppl", "mini", text, "--window", "100", "--limit", "3", "--json"
    )
    report = json.loads(stdout)
    assert (code, stderr) == (0, "")
    assert (report["windows"], report["windows_of"], report["interrupted"]) == (3, 3, False)
    assert 3 < report["perplexity"] < 300 and report["predicted_tokens"] == 3 * 100
    chats = tmp_path / "chats.json"
    chats.write_text(json.dumps(CHATS))
    code, stdout, stderr = run("eval", "ppl", "mini", chats)
    assert (code, stderr) == (0, "")
    assert "in 3 chats" in stdout and 1 < float(stdout.split("perplexity ")[1].split()[0]) < 5


def test_what_read_the_text_is_named(run, text):
    pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")
    small = ("eval", "ppl", "mini", text, "--window", "100", "--limit", "1")
    assert ", read by cpu\n" in run(*small)[1]
    # Prompts this short would be the CPU's if the device had not been named.
    code, stdout, _ = run(*small, "--device", "torch-cpu", "--json")
    assert code == 0 and json.loads(stdout)["prefill_device"] == "torch-cpu"


def test_needles_are_found(run):
    code, stdout, _ = run(
        "eval", "needle", "mini", "--lengths", "300,600", "--depths", "3", "--json"
    )
    report = json.loads(stdout)
    assert code == 0
    assert [row["length_tokens"] for row in report["needles"]] == [300, 600]
    assert sum(row["found"] for row in report["needles"]) >= 5
    assert all(len(row["misses"]) == 3 - row["found"] for row in report["needles"])


def test_kv_policies_are_compared(run, text, tmp_path):
    pytest.importorskip("moechat.kv.policy")
    plot = tmp_path / "kv.svg"
    small = ("--lengths", "300", "--depths", "3", "--window", "400", "--scored", "100")
    chosen = ("--policies", "int4,pdtrim", "--budgets", "0.3", "--windows", "2")
    code, stdout, _ = run(
        "eval", "kv", "mini", "--text", text, *small, *chosen, "--plot", plot, "--json"
    )
    assert code == 0
    report = json.loads(stdout)
    native, int4, pdtrim = report["rows"]
    assert [row["policy"] for row in report["rows"]] == ["native", "int4", "pdtrim"]
    assert native["sent_of_fp16"] == 1 and native["perplexity_change_percent"] == 0
    assert int4["perplexity_change_percent"] != 0 and 0.25 < int4["sent_of_fp16"] < 0.4
    assert 0.28 < pdtrim["sent_of_fp16"] <= 0.3
    assert pdtrim["needles"][0]["found"] < native["needles"][0]["found"]
    assert all(row["encode_seconds_per_token"] > 0 for row in report["rows"])
    ElementTree.fromstring(plot.read_text())


def test_an_interruption_leaves_the_figures_so_far(start):
    terminal, stderr = os.openpty()
    process = start(
        "eval", "needle", "mini", "--lengths", "200", "--depths", "200", "--json", stderr=stderr
    )
    os.close(stderr)
    shown = b""
    while b"needle 3 of 200" not in shown:
        shown += os.read(terminal, 1000)
    for _ in range(3):
        process.send_signal(signal.SIGINT)
    stdout, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    os.close(terminal)
    report = json.loads(stdout)
    assert process.returncode == 130 and b"Traceback" not in shown
    assert report["interrupted"] and 2 <= report["needles"][0]["trials"] < 200


def test_ctrl_c_ends_the_probe_and_not_the_answer(start):
    question = "What is the capital of Norway?"
    terminal, stderr = os.openpty()
    process = start(
        *("run", "mini", "--kv", "spectrum", "--kv-budget", "0.7", "--temperature", "0", question),
        stderr=stderr,
    )
    os.close(stderr)
    shown = b""
    while b"needle 1 of 3, INT4" not in shown:
        shown += os.read(terminal, 1000)
    process.send_signal(signal.SIGINT)
    stdout, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    shown += os.read(terminal, 10_000)
    os.close(terminal)
    assert (process.returncode, stdout) == (0, "The capital of Norway is Oslo.\n")
    said = " ".join(shown.decode().split())
    assert "interrupted; two tiers of precision are used, without INT4" in said


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        (["ppl", "mini", "absent.txt"], 3, "absent.txt"),
        (["ppl", "absent-model", __file__], 3, "absent-model"),
        (["ppl", "mini", __file__, "--window", "0"], 2, "--window"),
        (["needle", "mini", "--lengths", "5000"], 2, "4,096"),
        (["needle", "mini", "--depths", "0"], 2, "from 1 to 999"),
        (["ppl", "mini", __file__, "--limit", "0"], 2, "--limit"),
        (["ppl", "mini", __file__, "--window", "4096"], 2, "4,096 tokens, 1 of them"),
        (["ppl", "mini", "."], 3, "file-unreadable"),
        ([], 2, "what to measure: there is no sub-command. `moechat eval ppl"),
        (["kv", "mini", "--policies", "int3"], 2, "int3"),
        (["kv", "mini", "--budgets", "2"], 2, "--budgets"),
        (["kv", "mini", "--depths", "0"], 2, "nothing to measure"),
        (["kv", "mini", "--text", "absent.txt"], 3, "absent.txt"),
        (["kv", "mini", "--plot", "x.jpg"], 2, ".svg or .png"),
        (["kv", "mini", "--window", "400", "--scored", "400"], 2, "--scored"),
        (["mini"], 2, "mini"),
    ],
)
def test_errors_before_anything_is_measured(line, code, said, capsys):
    from moechat.cli.app import main

    assert main(["eval", *line]) == code
    stdout, stderr = capsys.readouterr()
    assert said in stderr and not stdout and stderr.startswith("error: ")
