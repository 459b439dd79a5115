"""The GPU's side of a mailbox: cpp/decode/mailbox.h has its layout and the order of its words.

Shapes: R rows, D hidden, K experts a token.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch  # type: ignore[import-not-found, unused-ignore]

LINE_BYTES = 64
GAVE_UP, ABORTED = 1, 2  # values of Mailbox.error
_WORDS = ("request", "reply", "abort", "rows")


@dataclass(frozen=True)
class Mailbox:
    """Views of host memory, page-locked for a GPU, and the client's own words on the device.

    ``num_rows``: how many rows of the next requests count, written before a step.
    ``sequence``: the last request's number. ``error``: not 0 once a wait gave up; then all later
    posts and waits return at once. ``limit``: nanoseconds that a wait may take. Words are [1].
    """

    memory: torch.Tensor  # uint8, to be given to the server by its address
    request: torch.Tensor  # int32 words
    reply: torch.Tensor
    abort: torch.Tensor
    rows: torch.Tensor
    x: torch.Tensor  # float32 [max_rows, D]
    ids: torch.Tensor  # int32 [max_rows, K]
    weights: torch.Tensor  # float32 [max_rows, K]
    y: torch.Tensor  # float32 [max_rows, D]
    sequence: torch.Tensor  # int32 on the device
    error: torch.Tensor  # int32 on the device
    num_rows: torch.Tensor  # int32 on the device
    limit: torch.Tensor  # int64 on the device
    arrived: torch.Tensor  # int32 on the device: blocks of a kernel that are done
    answered: torch.Tensor  # int32 on the device: the request that the wait under way is over for

    @classmethod
    def create(
        cls,
        device: torch.device,
        max_rows: int,
        hidden: int,
        experts_per_token: int,
        *,
        num_rows: torch.Tensor | None = None,
        limit_seconds: float = 1.0,
    ) -> Mailbox:
        """A mailbox as new; its first request is number 1. ``num_rows``: the caller's own word."""
        shapes = {
            "x": (torch.float32, hidden),
            "ids": (torch.int32, experts_per_token),
            "weights": (torch.float32, experts_per_token),
            "y": (torch.float32, hidden),
        }
        end, begins = len(_WORDS) * LINE_BYTES, {}
        for name, (_, width) in shapes.items():
            begins[name] = end
            end += -(-max_rows * width * 4 // LINE_BYTES) * LINE_BYTES
        memory = torch.zeros(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
        views = {
            name: memory[begins[name] : begins[name] + max_rows * width * 4]
            .view(dtype)
            .view(max_rows, width)
            for name, (dtype, width) in shapes.items()
        }
        for number, name in enumerate(_WORDS):
            views[name] = memory[number * LINE_BYTES :][:4].view(torch.int32)
        for name in ("sequence", "error", "num_rows", "arrived", "answered"):
            views[name] = torch.zeros(1, dtype=torch.int32, device=device)
        if num_rows is not None:
            views["num_rows"] = num_rows
        limit = torch.full((1,), int(limit_seconds * 1e9), dtype=torch.int64, device=device)
        return cls(memory=memory, limit=limit, **views)

    def reset(self) -> None:
        """As new. No kernel may be at work; the server is reset apart."""
        self.memory[: len(_WORDS) * LINE_BYTES].zero_()
        for word in (self.sequence, self.error, self.arrived, self.answered):
            word.zero_()


def post(
    x_RD: torch.Tensor, ids_RK: torch.Tensor, weights_RK: torch.Tensor, mailbox: Mailbox
) -> None:
    """ops.post on torch's CPU device, x normed already."""
    if int(mailbox.error) != 0:
        return
    count = int(mailbox.num_rows)
    mailbox.x[:count] = x_RD[:count]
    mailbox.ids[:count] = ids_RK[:count]
    mailbox.weights[:count] = weights_RK[:count]
    mailbox.rows.fill_(count)
    mailbox.sequence.add_(1)  # wraps around
    mailbox.request.copy_(mailbox.sequence)  # a word at once, after all the rest on x86


def wait(mailbox: Mailbox, x_RD: torch.Tensor, out_RD: torch.Tensor) -> None:
    """ops.wait on torch's CPU device."""
    deadline = time.monotonic() + int(mailbox.limit) * 1e-9
    reply, abort = mailbox.reply.numpy(), mailbox.abort.numpy()
    wanted = int(mailbox.sequence)
    while int(mailbox.error) == 0 and int(reply[0]) != wanted:
        if abort[0] != 0:
            mailbox.error.fill_(ABORTED)
        elif time.monotonic() > deadline:
            mailbox.error.fill_(GAVE_UP)
        time.sleep(0)  # the server may need the interpreter
    if out_RD is not x_RD:
        out_RD.copy_(x_RD)
    if int(mailbox.error) == 0:
        count = int(mailbox.num_rows)
        out_RD[:count] += mailbox.y[:count]
