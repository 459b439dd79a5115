"""The program as a process: real streams, closed streams, terminals, start-up. Loads no weights."""

import os
import pty
import signal
import subprocess
import sys
import time

import pytest

MOECHAT = (sys.executable, "-m", "moechat")
TIMEOUT_SECONDS = 20
# What only some command lines need, and none of those below.
HEAVY = ("rich", "prompt_toolkit", "jinja2", "huggingface_hub", "tokenizers", "torch", "numpy")


@pytest.fixture
def environment(tmp_path):
    return os.environ | {"MOECHAT_HOME": str(tmp_path), "COLUMNS": "80"}


@pytest.fixture
def run(environment):
    def run_(*arguments, **options):
        options.setdefault("stdin", subprocess.DEVNULL)
        options.setdefault("stdout", subprocess.PIPE)
        options.setdefault("stderr", subprocess.PIPE)
        if "input" in options:
            del options["stdin"]
        return subprocess.run(
            [*MOECHAT, *arguments],
            env=options.pop("env", environment),
            timeout=TIMEOUT_SECONDS,
            check=False,
            **options,
        )

    return run_


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--version",), 0),
        (("--help",), 0),
        (("run", "--help"), 0),
        (("list",), 0),
        ((), 2),
        (("run", "mini", "--nope"), 2),
        (("run", "mini", "--top-p", "7", "q"), 2),
        (("run", "mini"), 2),
        (("run", "no-such-model", "q"), 3),
        (("run", "deepseek-v3", "q"), 3),
        (("show", "no-such-model"), 3),
    ],
)
def test_exit_codes_and_streams(run, arguments, code):
    result = run(*arguments)
    assert result.returncode == code
    silent, spoken = (result.stdout, result.stderr) if code else (result.stderr, result.stdout)
    assert silent == b"" and spoken.strip()
    assert b"Traceback" not in spoken and b"\x1b" not in spoken


def test_bad_stdin_is_refused(run):
    assert run("run", "mini", input=b"abc\xff").returncode == 2
    assert run("run", "mini", input=b"\r\n").returncode == 2


def test_closed_streams(run):
    def closing(number):
        return {"preexec_fn": lambda: os.close(number), "stdin": None}

    assert run("run", "mini", **closing(0)).returncode == 2
    result = run("list", **closing(1))
    assert result.returncode == 2 and b"stdout is closed" in result.stderr
    assert run("run", "no-such-model", "q", **closing(2)).returncode == 3


def test_full_disk_is_one_line(run):
    with open("/dev/full", "wb") as full:
        result = run("list", stdout=full)
    assert result.returncode == 1
    assert result.stderr.count(b"\n") == 1 and b"No space left" in result.stderr


def test_closed_pipe_ends_silently(environment):
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        [*MOECHAT, "show", "deepseek-v3"],
        stdout=writer,
        stderr=subprocess.PIPE,
        env=environment,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, b"")


def test_other_encodings_do_not_crash(run, environment):
    environment |= {"PYTHONIOENCODING": "ascii"}
    result = run("run", "no-such-model", env=environment)
    assert result.returncode == 3 and b"[model-not-found]" in result.stderr


def test_interrupt_while_reading_stdin_is_quiet(environment):
    process = subprocess.Popen(
        [*MOECHAT, "run", "mini"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    # Until the process sleeps in read() on the pipe, as it does for good.
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not _waits_for_pipe(process.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    code = process.wait(TIMEOUT_SECONDS)
    stdout, stderr = process.stdout.read(), process.stderr.read()
    for stream in (process.stdin, process.stdout, process.stderr):
        stream.close()
    assert (code, stdout, stderr) == (130, b"", b"")


def test_two_interrupts_at_once_still_say_where_a_batch_goes_on(environment):
    process = subprocess.Popen(
        [*MOECHAT, "batch", "-", "--max-tokens", "4"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    process.stdin.write(b"hello\n")
    process.stdin.flush()
    first = process.stdout.readline()
    for _ in range(2):  # as `timeout -s INT` does
        process.send_signal(signal.SIGINT)
    code = process.wait(TIMEOUT_SECONDS)
    stdout, stderr = process.stdout.read(), process.stderr.read()
    for stream in (process.stdin, process.stdout, process.stderr):
        stream.close()
    assert first.startswith(b'{"index": 0, ') and (code, stdout) == (130, b"")
    assert stderr.startswith(b"interrupted after 1 results; the rest begins at line 2: ")
    assert stderr.count(b"\n") == 1


def _waits_for_pipe(process_id):
    with open(f"/proc/{process_id}/wchan") as file:
        if file.read() in ("pipe_read", "anon_pipe_read"):
            return True
    with open(f"/proc/{process_id}/syscall") as file:  # "0 0x0 …": read() of descriptor 0
        return file.read().startswith("0 0x0 ")


def test_terminal_in_and_pipe_out_without_prompt_is_refused(environment):
    controller, terminal = pty.openpty()
    try:
        result = subprocess.run(
            [*MOECHAT, "run", "mini"],
            stdin=terminal,
            capture_output=True,
            env=environment,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    finally:
        os.close(controller)
        os.close(terminal)
    assert (result.returncode, result.stdout) == (2, b"")
    assert result.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["list"], ["run", "nosuch", "--top-k", "1", "q"]]
)
def test_small_commands_import_nothing_heavy(run, environment, arguments):
    script = f"""
import sys
from moechat.cli.app import main
main({arguments!r})
print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        env=environment,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert result.stderr.decode().splitlines()[-1] == "[]"
