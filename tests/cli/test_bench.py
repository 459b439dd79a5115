"""``moechat bench`` as a process: streams, exit codes, pictures, and that nothing stays."""

import json
import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from moechat.folders import config_folder

MOECHAT = (sys.executable, "-m", "moechat")
MINI = (
    "bench",
    "kernels",
    "--shape",
    "mini",
    "--format",
    "fp8",
    "--experts",
    "32",
    "--bursts",
    "5",
)
TIMEOUT_SECONDS = 60


@pytest.fixture
def folder(tmp_path):
    """Where the weights are written."""
    place = tmp_path / "weights"
    place.mkdir()
    return place


@pytest.fixture
def environment(tmp_path, folder):
    own = {"MOECHAT_HOME": str(tmp_path / "home"), "TERM": "xterm", "TMPDIR": str(folder)}
    return os.environ | own


@pytest.fixture
def run(environment):
    def run_(*command, **options):
        options = {"env": environment, "capture_output": True, "text": True} | options
        done = subprocess.run(command, timeout=TIMEOUT_SECONDS, **options)
        return done.returncode, done.stdout, done.stderr

    return run_


@pytest.fixture
def running(environment):
    """Start a measurement with stderr on a terminal, and wait until that says ``words``."""
    processes = []

    def start(words, *arguments):
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [*MOECHAT, *arguments], env=environment, stdout=subprocess.PIPE, stderr=theirs
        )
        os.close(theirs)
        processes.append((process, ours))
        shown, deadline = b"", time.monotonic() + TIMEOUT_SECONDS
        while words not in shown:
            assert time.monotonic() < deadline
            shown += os.read(ours, 1000)
        return process

    yield start
    for process, ours in processes:
        process.kill()
        process.communicate()
        os.close(ours)


def test_json_is_one_object_on_stdout_and_the_picture_is_written(run, folder, tmp_path):
    plot = tmp_path / "roofline.svg"
    code, stdout, stderr = run(*MOECHAT, *MINI, "--json", "--plot", plot)
    assert (code, stderr) == (0, "")
    rows = json.loads(stdout)["rows"]
    assert [(row["op"], row["threads"]) for row in rows] == [("moe_ffn", 2)]
    picture = plot.read_text()
    assert f"{rows[0]['weight_gb_per_s']:g} of {rows[0]['read_gb_per_s']:g} GB/s" in picture
    assert os.listdir(folder) == []


def test_a_pipe_gets_a_plain_table(run):
    code, stdout, stderr = run(*MOECHAT, *MINI)
    assert (code, stderr) == (0, "") and "\x1b" not in stdout
    heading, row = stdout.splitlines()[1:3]
    assert heading.split()[:3] == ["FORMAT", "THREADS", "BATCH"]
    assert row.split()[0] == "fp8" and row.split()[-1] in ("slow", "fast", "mixed")


BLOCKED = (
    "import sys\n"
    "libraries = 'typer click prompt_toolkit gguf rich tokenizers jinja2 safetensors torch'\n"
    "for name in libraries.split():\n"
    "    sys.modules[name] = None\n"
    "from moechat.bench.__main__ import main\n"
    "sys.exit(main())"
)
# Laid over the entry in models.toml: built in no time.
SMALL_OLMOE = """
[olmoe-1b-7b.geometry]
hidden_size = 128
intermediate_size = 64
moe_intermediate_size = 64
num_heads = 4
num_kv_heads = 2
head_dim = 32
num_experts = 16
vocab_size = 512
"""
QUICK = ("--repetitions", "1", "--max-context", "16")


@pytest.fixture
def small_olmoe(tmp_path, monkeypatch):
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path / "home"))
    folder = config_folder()
    folder.mkdir(parents=True)
    (folder / "models.toml").write_text(SMALL_OLMOE)


def test_the_plain_command_line_needs_no_libraries_of_the_other(run, small_olmoe):
    code, stdout, stderr = run(sys.executable, "-c", BLOCKED, *MINI[1:], "--json")
    assert (code, stderr) == (0, "")
    assert json.loads(stdout)["rows"][0]["format"] == "fp8"
    code, stdout, stderr = run(sys.executable, "-c", BLOCKED, "model", "mini", *QUICK)
    assert (code, stderr) == (0, "") and "phases of a token" in stdout
    command = ("--synthetic", "olmoe-1b-7b", *QUICK, "--json")
    code, stdout, stderr = run(sys.executable, "-c", BLOCKED, *command)
    assert code == 0 and stderr.startswith("about ") and stderr.count("\n") == 1
    assert "B go to " in stderr and "removed at the end" in stderr
    assert json.loads(stdout)["whole"]["moe_layers"] == 16


def test_the_plain_command_lines_errors_are_one_line(run):
    code, stdout, stderr = run(sys.executable, "-m", "moechat.bench", "kernels", "--shape", "minu")
    assert (code, stdout) == (3, "") and stderr.startswith("error: ")
    assert stderr.endswith("[model-not-found]\n") and stderr.count("\n") == 1


def test_the_plain_command_line_survives_its_streams(run, tmp_path):
    command = (sys.executable, "-m", "moechat.bench", *MINI[1:], "--json")
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_whole_model_as_json_with_a_picture(run, tmp_path):
    plot = tmp_path / "speed.svg"
    code, stdout, stderr = run(*MOECHAT, "bench", "model", "mini", *QUICK, "--json", "--plot", plot)
    assert (code, stderr) == (0, "")
    assert json.loads(stdout)["model"] == "mini" and "decode: tok/s" in plot.read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "--synthetic deepseek-v3"),
        (("--synthetic", "nothing"), 3, "[model-not-found]"),
        (("--synthetic", "deepseek-v3", "--layers", "59"), 2, "58 layers"),
        (("model", "deepseek-v3"), 3, "moechat bench --synthetic deepseek-v3"),
        (("model", "nothing"), 3, "[model-not-found]"),
        (("model", "mini", "--plot", "here.jpg"), 2, ".svg"),
        (("model", "mini", "--max-context", "0"), 2, "--max-context"),
        (("model", "mini", "--device", "gpu"), 2, "Invalid value for '--device'"),
    ],
)
def test_errors_of_whole_models_likewise(run, arguments, code, words):
    result = run(*MOECHAT, "bench", *arguments)
    assert result[:2] == (code, "")
    assert words in result[2] and result[2].count("\n") == 1


@pytest.mark.parametrize("words", [(), ("model",), ("kernels",)])
def test_help_goes_to_stdout(run, words):
    code, stdout, stderr = run(*MOECHAT, "bench", *words, "--help")
    assert (code, stderr) == (0, "") and "--plot" in stdout and "--json" in stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--format", "fp9"), 2, "[usage]"),
        (("--threads", "1,,2"), 2, "beside a comma"),
        (("--experts", "-1"), 2, "whole number from 1"),
        (("--plot", "here.jpg"), 2, ".svg"),
        (("--isa", "neon"), 2, "avx512bf16"),
        (("--shape", "nothing"), 3, "[model-not-found]"),
    ],
)
def test_errors_are_one_line_with_their_exit_code(run, arguments, code, words):
    result = run(*MOECHAT, *MINI, *arguments)
    assert result[:2] == (code, "")
    assert words in result[2] and result[2].count("\n") == 1


def test_ctrl_c_ends_at_once_and_leaves_nothing(running, folder):
    process = running(b"round 1", *MINI[:-1], "1000")
    process.send_signal(signal.SIGINT)
    stdout, _ = process.communicate(timeout=5)
    assert (process.returncode, stdout) == (130, b"")
    assert os.listdir(folder) == []


def test_ctrl_c_does_not_wait_for_a_long_native_call(running):
    process = running(b"comparing", *MINI, "--isa", "ref", "--batch", "4096", "--threads", "1")
    time.sleep(0.5)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert time.monotonic() - began < 1


def test_a_killed_process_leaves_nothing(running, folder):
    process = running(b"round 1", *MINI[:-1], "1000")
    process.kill()
    process.communicate(timeout=5)
    assert os.listdir(folder) == []
