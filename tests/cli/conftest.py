"""``moechat`` as a process: started, killed at the end if it still runs, its streams collected."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

MOECHAT = (sys.executable, "-m", "moechat")
TIMEOUT_SECONDS = 60


@pytest.fixture
def environment(tmp_path):
    return os.environ | {"MOECHAT_HOME": str(tmp_path / "home"), "TERM": "xterm"}


@pytest.fixture
def start(environment):
    started = []

    def start_(*arguments, **options):
        for name in ("stdout", "stderr"):
            options.setdefault(name, subprocess.PIPE)
        command = [*MOECHAT, *map(str, arguments)]
        options = {"env": environment, "stdin": subprocess.DEVNULL, "text": True} | options
        process = subprocess.Popen(command, **options)
        started.append(process)
        return process

    yield start_
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def run(start):
    def run_(*arguments, **options):
        process = start(*arguments, **options)
        stdout, stderr = process.communicate(timeout=TIMEOUT_SECONDS)
        return process.returncode, stdout, stderr

    return run_
