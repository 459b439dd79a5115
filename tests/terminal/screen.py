"""A chat in a pseudo-terminal whose screen can be waited for."""

from __future__ import annotations

import json
import os
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pexpect
import pyte

pyte.graphics.TEXT[2] = "+blink"  # pyte knows no dim: nothing here blinks
FAKES = Path(__file__).with_name("fakes.py")
LIMIT_SECONDS = 10.0


class ChatScreen:
    """The chat of fakes.py on a screen, by default of 100 columns and 30 rows."""

    def __init__(
        self,
        home: Path,
        env: dict[str, str] | None = None,
        size: tuple[int, int] = (100, 30),
        **options: Any,
    ) -> None:
        variables = {**os.environ, "MOECHAT_HOME": str(home), "TERM": "xterm-256color"}
        variables["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        variables.pop("NO_COLOR", None)
        variables.update(env or {})
        self._columns, self._rows = size
        self.screen = pyte.HistoryScreen(*size, history=5000)
        self._stream = pyte.ByteStream(self.screen)
        self.bytes = b""
        self.is_over = False  # all that the process ever wrote is read
        self.child = pexpect.spawn(
            sys.executable,
            [str(FAKES), json.dumps(options)],
            env=variables,
            dimensions=size[::-1],
            timeout=LIMIT_SECONDS,
        )
        self.child.delaybeforesend = None
        self.wait(lambda: self.is_ready)

    @property
    def lines(self) -> list[str]:
        """Scrollback and screen, without blank lines at the end."""
        top = [
            "".join(row[x].data for x in range(self._columns)) for row in self.screen.history.top
        ]
        rows = [row.rstrip() for row in [*top, *self.screen.display]]
        return "\n".join(rows).rstrip().split("\n")

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def dim_text(self) -> str:
        """What is shown dim, line by line."""
        rows = [*self.screen.history.top, *(self.screen.buffer[y] for y in range(self._rows))]
        lines = ["".join(row[x].data for x in range(self._columns) if row[x].blink) for row in rows]
        return "\n".join(line for line in lines if line)

    @property
    def is_ready(self) -> bool:
        """The editor waits for a message: its prompt is the last line and empty."""
        return self.lines[-1] == ">" and self.screen.cursor.x == 2

    def wait(self, condition: Callable[[], bool], limit_seconds: float = LIMIT_SECONDS) -> float:
        """Read until ``condition``; the seconds that took."""
        start = time.monotonic()
        while not condition():
            left = start + limit_seconds - time.monotonic()
            assert left > 0, f"waited {limit_seconds} s; the screen:\n{self.text}"
            try:
                data = self.child.read_nonblocking(65536, timeout=min(left, 0.05))
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                self.is_over = True
                assert condition(), f"the chat ended; the screen:\n{self.text}"
                break
            self.bytes += data
            self._stream.feed(data)
        return time.monotonic() - start

    def wait_text(self, text: str) -> float:
        return self.wait(lambda: text in self.text)

    def send(self, keys: str) -> None:
        self.child.send(keys)

    def say(self, message: str, expect: str = "") -> None:
        """Send a line; wait for ``expect`` in what follows and for the next prompt."""
        known = len(self.lines)
        self.send(message + "\r")
        self.wait(
            lambda: self.is_ready and len(self.lines) > known and expect in self.since(known - 1)
        )

    def since(self, line: int) -> str:
        return "\n".join(self.lines[line:])

    @property
    def echoes(self) -> bool:
        """The terminal shows what is typed, as it did before the chat."""
        return bool(termios.tcgetattr(self.child.child_fd)[3] & termios.ECHO)

    def exit_code(self) -> int:
        """Wait for the end of the process."""
        self.wait_end()
        return int(self.child.exitstatus)

    def wait_end(self) -> None:
        """Read all that the process writes, and wait for its end."""
        self.wait(lambda: self.is_over)
        self.child.wait()

    def close(self) -> None:
        self.child.close(force=True)
