"""Streams of decode's own on a GPU: a prompt on the same card uses the default one."""

from __future__ import annotations

import contextlib
from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]


def own_stream(device: torch.device) -> Any:
    """A new stream; None off CUDA. Its kernels come before those of a prompt's streams."""
    return torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call, unused-ignore]


def on_stream(stream: Any) -> contextlib.AbstractContextManager[Any]:
    """The stream, and its device, for whatever this thread asks; nothing for None."""
    guard: contextlib.AbstractContextManager[Any] = torch.cuda.stream(stream)
    return guard if stream is not None else contextlib.nullcontext()
