"""Host memory to a device in small pieces, through little page-locked memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found, unused-ignore]
from numpy.typing import NDArray

from moechat.gpu_weights.host_read import from_host

_cuda: Any = torch.cuda  # parts of it have no types
PIECE_BYTES = 8 << 20  # after so many somebody may look whether to go on


class HostPieces:
    """By way of two page-locked buffers, on a stream of its own; on the CPU device at once.

    Not from mapped weights themselves: prefill page-locks windows of them meanwhile, and a read
    must not cross the border of one. Kernels read: copies would wait for a prompt's (host_read).
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
        """Copies are made in here, after all work so far of the caller's stream; they are done when
        it is left."""
        if not self._on_gpu:
            yield
            return
        self._stream.wait_stream(_cuda.current_stream(self._device))
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
        from_host(into, buffer)
        free.record(self._stream)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [bytes] of a dense tensor, in place."""
    return tensor.view(-1).view(torch.uint8)
