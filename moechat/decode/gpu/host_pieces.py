"""Copies of mapped weights to a device in small pieces, so that decode need not wait for long."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found, unused-ignore]
from numpy.typing import NDArray

_cuda: Any = torch.cuda  # parts of it have no types
# As prefill's: longer copies would keep the small ones of a step on the same link waiting.
PIECE_BYTES = 8 << 20


class HostPieces:
    """By way of two page-locked buffers on a stream of its own; on the CPU device at once.

    Not from the mapping itself: prefill page-locks windows of it meanwhile, and a copy must not
    cross the border of one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        self._turn = 0
        self._buffers: list[torch.Tensor] = []
        if self._on_gpu:
            self._stream = _cuda.Stream(device, priority=-1)
            self._free = [_cuda.Event() for _ in range(2)]
            self._buffers = [
                torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)
            ]

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Copies are made in here; they are done when it is left."""
        if not self._on_gpu:
            yield
            return
        try:
            with _cuda.stream(self._stream):
                yield
        finally:
            self._stream.synchronize()

    def copy(self, target: torch.Tensor, source: NDArray[np.uint8]) -> Iterator[None]:
        """All of ``source`` to uint8 [bytes] of the device; a stop after each piece."""
        for begin in range(0, len(source), PIECE_BYTES):
            piece = source[begin : begin + PIECE_BYTES]
            into = target[begin : begin + len(piece)]
            if self._on_gpu:
                self._send(into, piece)
            else:
                np.copyto(into.numpy(), piece)
            yield

    def _send(self, into: torch.Tensor, piece: NDArray[np.uint8]) -> None:
        free, buffer = self._free[self._turn], self._buffers[self._turn][: len(piece)]
        self._turn = 1 - self._turn
        free.synchronize()
        np.copyto(buffer.numpy(), piece)
        into.copy_(buffer, non_blocking=True)
        free.record(self._stream)
