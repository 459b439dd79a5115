"""The program as a process, answering with mini."""

import json
import os
import signal
import subprocess
import sys

import pytest

MOECHAT = (sys.executable, "-m", "moechat", "run", "mini")
QUESTION = "What is the capital of Norway?"
ANSWER = b"The capital of Norway is Oslo.\n"
STORY = "Tell me a story about a fox."
TIMEOUT_SECONDS = 30


@pytest.fixture
def start(tmp_path):
    """Start ``moechat run mini …`` with pipes; killed at the end if it still runs."""
    started = []

    def start_(*arguments, **options):
        for name in ("stdin", "stdout", "stderr"):
            options.setdefault(name, subprocess.PIPE)
        environment = os.environ | {"MOECHAT_HOME": str(tmp_path)}
        process = subprocess.Popen([*MOECHAT, *arguments], env=environment, **options)
        started.append(process)
        return process

    yield start_
    for process in started:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def finish(process, stdin=None):
    stdout, stderr = process.communicate(stdin, timeout=TIMEOUT_SECONDS)
    return process.returncode, stdout, stderr


def test_answer_alone_is_on_stdout(start):
    assert finish(start("--temperature", "0", QUESTION), b"") == (0, ANSWER, b"")
    assert finish(start("--temperature", "0"), QUESTION.encode() + b"\r\n") == (0, ANSWER, b"")


def test_resident_weights_give_the_same_answer(start):
    flags = ("--temperature", "0", "--resident")
    assert finish(start(*flags, QUESTION), b"") == (0, ANSWER, b"")
    code, stdout, stderr = finish(start(*flags, "--stats", "line", QUESTION), b"")
    assert (code, stdout) == (0, ANSWER)
    lines = stderr.decode().splitlines()
    assert len(lines) == 2 and lines[0].startswith("resident on ") and lines[1].startswith("[")


def test_data_from_a_pipe_is_found(start):
    filler = "The weather was fine and people walked by the river. " * 20
    data = f"{filler}The code of Clara is 48213. {filler}\n".encode()
    code, stdout, _ = finish(start("--temperature", "0", "What is the code of Clara?"), data)
    assert code == 0 and b"48213" in stdout


def test_same_seed_gives_the_same_text(start):
    flags = ("--seed", "11", "--temperature", "0.9", "--max-tokens", "24", STORY)
    first, second = finish(start(*flags), b""), finish(start(*flags), b"")
    assert first[0] == 0 and first[1] == second[1] and len(first[1]) > 20


def test_batch_answers_lines_before_stdin_ends(start):
    process = start("--batch", "--temperature", "0")
    process.stdin.write(b"What day comes after Friday?\n")
    process.stdin.flush()
    first = json.loads(process.stdout.readline())
    assert first["index"] == 0 and "Saturday" in first["text"]
    assert first["finish_reason"] == "stop" and first["usage"]["prompt_tokens"] > 0
    code, stdout, _ = finish(process, b'{"prompt": "What is 7 plus 8?"}\n{broken\n')
    second, third = map(json.loads, stdout.splitlines())
    assert code == 6 and "15" in second["text"] and third["error"]["name"] == "bad-line"


def test_batch_lines_do_not_depend_on_each_other(start):
    line = b"What day comes after Friday?\n"
    _, stdout, _ = finish(start("--batch", "--temperature", "0"), line * 2)
    first, second = map(json.loads, stdout.splitlines())
    assert first["usage"] == second["usage"] and first["text"] == second["text"]


def test_interrupt_ends_an_answer_and_keeps_it(start):
    process = start("--temperature", "0", "--stats", "json", STORY, stdin=subprocess.DEVNULL)
    begin = process.stdout.read(12)
    process.send_signal(signal.SIGINT)
    code, rest, stderr = finish(process)
    assert code == 130
    assert begin.startswith(b"Once upon a") and rest.endswith(b"\n")
    assert b"Traceback" not in stderr
    assert json.loads(stderr.splitlines()[-1])["finish_reason"] == "cancelled"


def test_interrupt_of_a_waiting_batch_says_where_to_go_on(start):
    process = start("--batch", "--temperature", "0")
    process.stdin.write(b"What day comes after Friday?\n")
    process.stdin.flush()
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(TIMEOUT_SECONDS) == 130
    assert b"tail -n +2" in process.stderr.read()


def test_reader_that_goes_away_ends_it_silently(start):
    process = start(STORY, stdin=subprocess.DEVNULL)
    process.stdout.read(4)
    process.stdout.close()
    assert process.wait(TIMEOUT_SECONDS) == 141
    assert process.stderr.read() == b""


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--ctx", "5000"), 2, b"4096"),
        (("--ctx", "4"), 4, b"limit is 4."),
        (("--threads", "99999999"), 2, b"threads"),
    ],
)
def test_impossible_settings_are_one_line(start, flags, code, words):
    result = finish(start(*flags, QUESTION), b"")
    assert result[:2] == (code, b"")
    assert result[2].count(b"\n") == 1 and words in result[2]


def test_ten_megabytes_of_one_letter_are_refused(start):
    code, stdout, stderr = finish(start(), b"a" * 10_000_000)
    assert (code, stdout) == (4, b"")
    assert b"at least" in stderr and b"4096" in stderr


def test_one_answer_imports_neither_torch_nor_the_chat(tmp_path):
    script = f"""
import sys
from moechat.cli.app import main
main(["run", "mini", "--max-tokens", "2", {QUESTION!r}])
names = ("torch", "rich", "prompt_toolkit", "huggingface_hub", "markdown_it", "pygments")
print([name for name in names if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=TIMEOUT_SECONDS,
        check=True,
    )
    assert done.stderr.decode().splitlines()[-1] == "[]"
