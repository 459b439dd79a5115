"""A mailbox in numpy memory, and the part of a GPU that posts requests to it."""

from __future__ import annotations

import time

import numpy as np

from moechat import _native


class MailboxClient:
    """Posts requests and waits for replies, as a GPU does. (x86 keeps the order of stores.)"""

    def __init__(self, max_rows: int, hidden: int, experts_per_token: int) -> None:
        layout = _native.mailbox_layout(max_rows, hidden, experts_per_token)
        memory = np.zeros(layout["total"] + 64, np.uint8)
        begin = -memory.ctypes.data % 64
        self.memory = memory[begin : begin + layout["total"]]
        self.sequence = 0

        def view(name: str, dtype: type, *shape: int) -> np.ndarray:
            end = layout[name] + 4 * int(np.prod(shape))
            return self.memory[layout[name] : end].view(dtype).reshape(shape)

        self.request, self.reply, self.abort, self.rows = (
            view(name, np.uint32, 1) for name in ("request", "reply", "abort", "rows")
        )
        self.x = view("x", np.float32, max_rows, hidden)
        self.ids = view("ids", np.int32, max_rows, experts_per_token)
        self.weights = view("weights", np.float32, max_rows, experts_per_token)
        self.y = view("y", np.float32, max_rows, hidden)

    @property
    def place(self) -> tuple[int, int]:
        """(address, bytes), as ExpertServer takes it."""
        return self.memory.ctypes.data, self.memory.nbytes

    def post(self, x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> None:
        """The next request, of x [rows, hidden] and ids and weights [rows, experts_per_token]."""
        rows = len(x)
        self.x[:rows], self.ids[:rows], self.weights[:rows] = x, ids, weights
        self.rows[0] = rows
        self.sequence = (self.sequence + 1) % 2**32
        self.request[0] = self.sequence

    def wait(self, limit_seconds: float = 10.0) -> np.ndarray | None:
        """y [rows, hidden] of the request posted last, or None when it was aborted."""
        deadline = time.monotonic() + limit_seconds
        while self.reply[0] != self.sequence:
            if self.abort[0]:
                return None
            assert time.monotonic() < deadline, "no reply"
            time.sleep(0)
        return self.y[: self.rows[0]].copy()
