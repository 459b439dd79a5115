"""``moechat quantize`` as a process, on mini."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from oracles import MINI

MOECHAT = (sys.executable, "-m", "moechat")
QUESTION = "What is the capital of Norway?"
TIMEOUT_SECONDS = 60


@pytest.fixture(scope="module")
def int4_folder(tmp_path_factory):
    """mini in INT4, and what the command printed."""
    target = tmp_path_factory.mktemp("quantize") / "int4"
    done = subprocess.run(
        [*MOECHAT, "quantize", "mini", target, "--to", "int4", "--json"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=True,
    )
    assert done.stderr == ""
    return target, json.loads(done.stdout)


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def start_and_wait_for_work(start, target, *flags, **options):
    process = start("quantize", "mini", target, "--to", "int4", *flags, **options)
    part = target / "model.safetensors.part"
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not (part.exists() and part.stat().st_size > 1_000_000):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)
    return process


def test_json_report_has_units_and_is_alone_on_stdout(int4_folder):
    target, report = int4_folder
    assert report["already_complete"] is False
    assert report["to"] == "int4" and Path(report["target"]) == target
    assert report["bytes_before"] == 34_894_924 and report["weight_files"] == 1
    size = (target / "model.safetensors").stat().st_size
    assert 0 < size - report["bytes_after"] < 400_000  # the header
    rows = {row["kind"]: row for row in report["kinds"]}
    assert rows["routed experts"]["tensors"] == 5 * 32 * 3
    for kind in ("attention", "dense MLP", "shared experts", "routed experts"):
        assert 0.078 < rows[kind]["relative_rms_error"] < 0.083
        assert rows[kind]["worst_tensor"].startswith("model.layers.")
        assert rows[kind]["bytes_after"] < 0.57 * rows[kind]["bytes_before"]
    for kind in ("embeddings", "norms", "routers"):
        assert rows[kind]["relative_rms_error"] is None
        assert rows[kind]["bytes_after"] == rows[kind]["bytes_before"]
    assert report["not_quantised"] == []
    assert report["seconds"] > 0 and report["read_mb_per_second"] > 0


def test_all_files_of_a_model_are_there(int4_folder):
    target, _ = int4_folder
    names = {path.name for path in target.iterdir()}
    expected = {path.name for path in MINI.iterdir() if "-of-" not in path.name}
    assert names == expected | {"model.safetensors"}


def test_the_int4_model_answers(run, int4_folder):
    answer = run("run", int4_folder[0], "--temperature", "0", QUESTION)
    assert answer == (0, "The capital of Norway is Oslo.\n", "")


@pytest.mark.parametrize("to", ["fp8", "bf16"])
def test_the_fp8_and_bf16_models_answer(run, tmp_path, to):
    code, stdout, stderr = run("quantize", "mini", tmp_path / to, "--to", to)
    assert (code, stderr) == (0, "")
    assert stdout.startswith("KIND ") and "routed experts" in stdout and "MB/s" in stdout
    assert "\x1b" not in stdout
    answer = run("run", tmp_path / to, "--temperature", "0", QUESTION)
    assert answer == (0, "The capital of Norway is Oslo.\n", "")


def test_killed_half_way_and_run_again_it_gives_the_same_bytes(start, run, tmp_path, int4_folder):
    target = tmp_path / "target"
    process = start_and_wait_for_work(start, target)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert (target / "quantize.journal").exists()
    code, _, stderr = run("quantize", "mini", target, "--to", "int4")
    assert (code, stderr) == (0, "")
    assert contents(target) == contents(int4_folder[0])


def test_a_complete_result_is_left_alone(run, int4_folder):
    target, before = int4_folder[0], contents(int4_folder[0])
    code, stdout, stderr = run("quantize", "mini", target, "--to", "int4")
    assert (code, stderr) == (0, "")
    assert stdout == f"{target} is complete already; nothing was left to do\n"
    code, stdout, _ = run("quantize", "mini", target, "--to", "int4", "--json")
    assert code == 0 and json.loads(stdout)["already_complete"] is True
    assert contents(target) == before
    code, stdout, stderr = run("quantize", "mini", target, "--to", "fp8")
    assert (code, stdout) == (2, "") and "not empty" in stderr


def test_interrupted_it_says_how_to_go_on_and_loses_nothing(start, run, tmp_path, int4_folder):
    target = tmp_path / "target"
    process = start_and_wait_for_work(start, target, start_new_session=True)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers, too
    stdout, stderr = process.communicate(timeout=TIMEOUT_SECONDS)
    assert (process.returncode, stdout) == (130, "")
    assert stderr.count("\n") == 1 and stderr.startswith("interrupted after ")
    assert "the same command goes on from there" in stderr
    done = len((target / "quantize.journal").read_bytes().splitlines()) - 1
    assert done > 0
    code, stdout, _ = run("quantize", "mini", target, "--to", "int4", "--json")
    report = json.loads(stdout)
    assert code == 0 and report["resumed"] is True
    assert report["bytes_read"] < report["bytes_before"]
    assert contents(target) == contents(int4_folder[0])


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("mini", "{tmp}/new"), 2, "--to"),
        (("mini", "{tmp}/new", "--to", "int5"), 2, "int4, fp8, bf16"),
        (("mini", "--to", "int4"), 2, "DST"),
        (("nosuch", "{tmp}/new", "--to", "int4"), 3, "known names"),
        (("mini", "{tmp}", "--to", "int4"), 2, "not empty"),
        (("mini", "{tmp}/" + 300 * "x", "--to", "int4"), 2, "File name too long"),
        (("mini", "{tmp}/no/where", "--to", "int4"), 2, "no folder"),
        (("{tmp}", "{tmp}/new", "--to", "int4"), 3, "config.json"),
    ],
)
def test_what_cannot_be_done_is_one_line(run, tmp_path, arguments, code, says):
    (tmp_path / "mine").write_text("x")
    done = run("quantize", *(argument.format(tmp=tmp_path) for argument in arguments))
    assert done[:2] == (code, "")
    assert done[2].count("\n") == 1 and says in done[2] and done[2].startswith("error: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"]


def on_a_terminal(start, environment, target, **variables):
    """What the command writes on a terminal for stderr; stdout is a pipe."""
    controller, terminal = pty.openpty()
    process = start(
        "quantize", "mini", target, "--to", "fp8", stderr=terminal, env=environment | variables
    )
    os.close(terminal)
    shown = b""
    while True:
        try:
            piece = os.read(controller, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        shown += piece
    os.close(controller)
    stdout, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0 and "\x1b" not in stdout and "routed experts" in stdout
    return shown.decode()


def test_progress_is_shown_on_terminals_only(start, environment, tmp_path):
    shown = on_a_terminal(start, environment, tmp_path / "a", COLUMNS="120")
    assert "tensors" in shown and "MB/s" in shown and "34.9/34.9 MB" in shown
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l")  # the cursor is back
    assert on_a_terminal(start, environment, tmp_path / "b", NO_COLOR="1") == ""


def test_the_last_state_is_shown_however_soon_it_follows(monkeypatch):
    from moechat.cli import quantize as command
    from moechat.quantize.run import Progress

    monkeypatch.setattr(command, "_REFRESH_SECONDS", 1000)
    monkeypatch.setattr("moechat.terminal.sinks.escapes_allowed", lambda stream: True)
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with command._ProgressBar("x to fp8") as bar:
        for done in range(5):
            bar.update(Progress(done, 4, done * 1000, 4000))
    assert "4/4 tensors" in sys.stderr.getvalue()


def test_a_piped_run_imports_neither_torch_nor_rich(tmp_path):
    script = f"""
import sys
from moechat.cli.app import main
assert main(["quantize", "mini", {str(tmp_path / "target")!r}, "--to", "bf16"]) == 0
names = ("torch", "rich", "prompt_toolkit", "jinja2", "tokenizers", "huggingface_hub")
print([name for name in names if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=True,
    )
    assert done.stderr.splitlines()[-1] == "[]"
