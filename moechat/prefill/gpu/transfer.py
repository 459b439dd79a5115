"""Copies from host memory to a device: on a stream of their own on CUDA, at once on the CPU device.

Both have the same calls, so that everything above them is the same code.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Protocol

import numpy as np
import torch  # type: ignore[import-not-found, unused-ignore]
from numpy.typing import NDArray

from moechat import _native
from moechat.prefill.gpu.register import Registrar

Bytes = NDArray[np.uint8]
_cuda: Any = torch.cuda  # parts of it have no types
# What of other streams gets a turn at all has it between two pieces (see gpu_weights/host_read).
PIECE_BYTES = 8 << 20
STAGING_BUFFERS = 4
# Copies that are asked for ahead: the driver keeps a CPU busy while its queue is full.
_AHEAD_BYTES, _AHEAD_PARTS = 128 << 20, 4


class Transfer(Protocol):
    """Marks are points in the order of a stream: torch.cuda.Event, or a time in seconds."""

    staged_bytes: int

    def host_buffer(self, size_bytes: int) -> torch.Tensor:
        """uint8, page-locked where that helps ``copy_small``."""

    def copy(self, target: torch.Tensor, sources: Iterable[tuple[int, Bytes]]) -> None:
        """Bytes of mapped files to where they begin in uint8 memory of the device, in order."""

    def copy_small(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """The same from a host buffer, which must stay as it is until the next mark."""

    def copy_mark(self) -> Any:
        """Reached when the copies so far are done."""

    def compute_mark(self) -> Any:
        """Reached when the work so far of the caller's stream is done."""

    def copies_wait(self, mark: Any) -> None:
        """Later copies start after it."""

    def compute_waits(self, mark: Any) -> None:
        """Later work of the caller's stream starts after it."""

    def host_waits(self, mark: Any) -> None:
        """Return when it is reached."""

    def seconds(self, first: Any, last: Any) -> float:
        """Between two marks; waits for the last."""

    def enter_thread(self) -> None:
        """Called first by a thread that copies."""

    def close(self) -> None:
        """Wait for all copies and let go of the host's memory."""


class CpuTransfer:
    """To torch's CPU device: a copy is done when the call returns."""

    def __init__(self) -> None:
        self.staged_bytes = 0

    def host_buffer(self, size_bytes: int) -> torch.Tensor:
        """As in Transfer."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, sources: Iterable[tuple[int, Bytes]]) -> None:
        """As in Transfer."""
        for begin, source in sources:
            np.copyto(target.numpy()[begin : begin + len(source)], source)

    def copy_small(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """As in Transfer."""
        target.copy_(source)

    def copy_mark(self) -> float:
        """As in Transfer."""
        return time.perf_counter()

    compute_mark = copy_mark

    def copies_wait(self, mark: float) -> None:
        """It is past."""

    compute_waits = host_waits = copies_wait

    def seconds(self, first: float, last: float) -> float:
        """As in Transfer."""
        return last - first

    def enter_thread(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


class CudaPageLock:
    """cudaHostRegister with cudaHostRegisterReadOnly (CUDA runtime API, memory management).

    Memory is locked once a process, for all its devices (cudaHostRegisterPortable): devices that
    stream the same file share its windows, and the last one unlocks them.
    """

    _PORTABLE, _READ_ONLY = 1, 8
    _turn = threading.Lock()
    _users: ClassVar[dict[tuple[int, int], int]] = {}  # of each address and size that is locked

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sizes: dict[int, int] = {}  # by address, of what this one locked

    def lock(self, address: int, size_bytes: int) -> bool:
        """As in PageLock."""
        window = address, size_bytes
        with self._turn:
            if window not in self._users and not self._register(*window):
                return False
            self._users[window] = self._users.get(window, 0) + 1
        self._sizes[address] = size_bytes
        return True

    def _register(self, address: int, size_bytes: int) -> bool:
        flags = self._PORTABLE | self._READ_ONLY
        if int(_cuda.cudart().cudaHostRegister(address, size_bytes, flags)) == 0:
            return True
        # The runtime hands a refusal to the thread's next kernel launch, too: let this one have it.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self._device)
        return False

    def unlock(self, address: int) -> None:
        """As in PageLock."""
        window = address, self._sizes.pop(address)
        with self._turn:
            self._users[window] -= 1
            if not self._users[window]:
                del self._users[window]
                _cuda.cudart().cudaHostUnregister(address)


class CudaTransfer:
    """Pieces on a copy stream; straight from page-locked windows, else by way of buffers."""

    def __init__(
        self, device: torch.device, registrar: Registrar, *, piece_bytes: int = PIECE_BYTES
    ) -> None:
        self.device = device
        self.registrar = registrar
        self.stream = _cuda.Stream(device)
        self.staged_bytes = 0
        self._piece_bytes = piece_bytes
        self._staging: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._turn = 0
        self._lock = threading.Lock()
        self._asked_bytes = 0  # since the last of these
        self._ahead: deque[torch.cuda.Event] = deque()

    def host_buffer(self, size_bytes: int) -> torch.Tensor:
        """As in Transfer."""
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: torch.Tensor, sources: Iterable[tuple[int, Bytes]]) -> None:
        """As in Transfer."""
        locked: list[tuple[int, Bytes]] = []
        with self._lock, _cuda.stream(self.stream):
            for place, source in sources:
                for begin, end, is_locked in self.registrar.spans(source):
                    if is_locked:
                        locked.append((place + begin, source[begin:end]))
                        self._asked_bytes += end - begin
                        if self._asked_bytes >= _AHEAD_BYTES:
                            self._copy_locked(target, locked)
                            locked = []
                            self._wait_for_room()
                        continue
                    self._copy_locked(target, locked)
                    locked = []
                    host = _tensor_on(source)
                    for first, last in self._pieces(begin, end):
                        self._copy_staged(target[place + first : place + last], host[first:last])
            self._copy_locked(target, locked)

    def _copy_locked(self, target: torch.Tensor, sources: list[tuple[int, Bytes]]) -> None:
        """All pieces in one call: thousands of calls of Python's would keep other threads waiting
        for the interpreter lock."""
        if sources:
            _native.copy_pieces(
                _copy_function(), target.data_ptr(), target.nbytes,
                sources, self._piece_bytes, self.stream.cuda_stream,
            )  # fmt: skip

    def _wait_for_room(self) -> None:
        self._asked_bytes = 0
        here = _cuda.Event(blocking=True)
        here.record(self.stream)
        self._ahead.append(here)
        if len(self._ahead) == _AHEAD_PARTS:
            self._ahead.popleft().synchronize()

    def _copy_staged(self, target: torch.Tensor, host: torch.Tensor) -> None:
        if not self._staging:
            self._staging = [
                (self.host_buffer(self._piece_bytes), _cuda.Event()) for _ in range(STAGING_BUFFERS)
            ]
        buffer, left = self._staging[self._turn]
        self._turn = (self._turn + 1) % STAGING_BUFFERS
        left.synchronize()
        piece = buffer[: len(host)]
        piece.copy_(host)
        target.copy_(piece, non_blocking=True)
        left.record(self.stream)
        self.staged_bytes += len(host)

    def _pieces(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        for first in range(begin, end, self._piece_bytes):
            yield first, min(end, first + self._piece_bytes)

    def copy_small(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """As in Transfer."""
        with _cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)

    def copy_mark(self) -> torch.cuda.Event:
        """As in Transfer."""
        return self._mark(self.stream)

    def compute_mark(self) -> torch.cuda.Event:
        """As in Transfer."""
        return self._mark(_cuda.current_stream(self.device))

    def _mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        mark: torch.cuda.Event = _cuda.Event(enable_timing=True, blocking=True)
        mark.record(stream)
        return mark

    def copies_wait(self, mark: torch.cuda.Event) -> None:
        """As in Transfer."""
        self.stream.wait_event(mark)

    def compute_waits(self, mark: torch.cuda.Event) -> None:
        """As in Transfer."""
        _cuda.current_stream(self.device).wait_event(mark)

    def host_waits(self, mark: torch.cuda.Event) -> None:
        """As in Transfer."""
        mark.synchronize()

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        """As in Transfer."""
        last.synchronize()
        return float(first.elapsed_time(last)) / 1000

    def enter_thread(self) -> None:
        """The driver's calls of this thread are for this device."""
        _cuda.set_device(self.device)

    def close(self) -> None:
        """As in Transfer."""
        with contextlib.suppress(RuntimeError):  # a device that failed: whoever used it was told
            self.stream.synchronize()
        self._staging = []
        self._ahead.clear()
        with _cuda.device(self.device):  # this thread may never have been on it
            self.registrar.close()


@functools.cache
def _copy_function() -> int:
    """Address of cuMemcpyHtoDAsync (CUDA driver API, memory management)."""
    driver = ctypes.CDLL("libcuda.so.1")
    return ctypes.cast(driver.cuMemcpyHtoDAsync_v2, ctypes.c_void_p).value or 0


class _Memory:
    """Memory as numpy's array interface describes it. Never written: torch only has no other."""

    def __init__(self, array: Bytes) -> None:
        self._array = array
        self.__array_interface__ = {
            "data": (array.ctypes.data, False),
            "shape": array.shape,
            "typestr": "|u1",
            "version": 3,
        }


def _tensor_on(array: Bytes) -> torch.Tensor:
    """A tensor on the bytes of a contiguous, perhaps read-only array, which it keeps alive."""
    return torch.from_numpy(np.asarray(_Memory(array)))
