"""A contestant in a process of its own, asked over a pipe; plain Python, for any interpreter.

A request is a line of JSON, [operation, arguments]; the answer {"value", "seconds", "cpu_seconds"},
the processor time being that of all the process's threads. Between requests it waits for the pipe.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class Contestant:
    """The asking side. ``seconds`` and ``cpu_seconds`` are the last operation's."""

    def __init__(self, python: str, script: str, arguments: Sequence[str] = ()) -> None:
        self.name = script
        self.seconds = self.cpu_seconds = 0.0
        self._process = subprocess.Popen(
            [python, str(HERE / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches the asking side alone
        )

    @property
    def pid(self) -> int:
        """The process' number."""
        return self._process.pid

    def ask(self, operation: str, *arguments: Any) -> Any:
        """The value of an operation; SystemExit when the process has ended."""
        assert self._process.stdin and self._process.stdout
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps([operation, arguments]), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self.name} has ended with {self._process.wait()} at '{operation}'")
        fields = json.loads(answer)
        self.seconds, self.cpu_seconds = fields["seconds"], fields["cpu_seconds"]
        return fields["value"]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Contestant:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:  # whatever it computes, nobody waits for it
            self._process.kill()
        self.close()


def serve(worker_type: type) -> None:
    """The answering side: methods of ``worker_type(*command line)``, until the pipe ends."""
    # Libraries print what they like; answers keep a descriptor of their own, errors theirs.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        worker = worker_type(*sys.argv[1:])
        for line in sys.stdin:
            operation, arguments = json.loads(line)
            began, cpu_began = time.perf_counter(), time.process_time()
            value = getattr(worker, operation)(*arguments)
            answer = {
                "value": value,
                "seconds": time.perf_counter() - began,
                "cpu_seconds": time.process_time() - cpu_began,
            }
            print(json.dumps(answer), file=answers, flush=True)
    except BrokenPipeError:  # the asking side has gone
        pass


def run(main: Callable[[], None]) -> None:
    """A script's main; when it is interrupted or told to end, what it holds is given back."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
