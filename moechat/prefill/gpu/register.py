"""Mapped files are page-locked window by window, so that the GPU copies straight from them.

cudaHostRegister with the read-only flag works on shared read-only mappings; it makes no copy, and
anonymous memory does not grow. It is slower than the copies themselves, so it is done ahead of them
and kept until the end. What is beyond the limit, or refused, is copied by way of a buffer.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moechat.weights.free_memory import free_memory_bytes

WINDOW_BYTES = 1 << 30
# What page-locked files leave for everything else.
RESERVE_BYTES = 8 << 30


class PageLock(Protocol):
    """The driver's two calls."""

    def lock(self, address: int, size_bytes: int) -> bool:
        """Page-lock for reading; False when refused."""

    def unlock(self, address: int) -> None:
        """Undo it."""


def default_limit_bytes() -> int:
    """How much may be page-locked: free memory, pages of files included, less the reserve."""
    return max(0, (free_memory_bytes() or 0) - RESERVE_BYTES)


class _Window:
    """A window whose turn it is or was: ``done`` is set when ``locked`` is known."""

    def __init__(self, content: NDArray[np.uint8], size_bytes: int) -> None:
        self.content = content  # keeps its mapping from being closed
        self.size_bytes = size_bytes
        self.locked = False
        self.done = threading.Event()


class Registrar:
    """Windows of mapped files that are page-locked, each at its first use. Any thread."""

    def __init__(
        self, page_lock: PageLock, *, limit_bytes: int, window_bytes: int = WINDOW_BYTES
    ) -> None:
        if window_bytes % mmap.PAGESIZE:
            raise ValueError(f"window_bytes must be whole pages, not {window_bytes}")
        self._page_lock = page_lock
        self._limit_bytes = limit_bytes
        self._window_bytes = window_bytes
        self._lock = threading.Lock()
        self._windows: dict[int, _Window] = {}  # by address
        self._closed = False
        self._ahead: threading.Thread | None = None
        self.registered_bytes = 0

    def spans(self, source: NDArray[np.uint8]) -> Iterator[tuple[int, int, bool]]:
        """Parts [begin, end) of ``source`` that lie in one window, and whether it is locked.

        A copy may not cross a border: the driver knows each window as an allocation of its own.
        """
        content = _mapped_file(source)
        if content is None:
            yield 0, len(source), False
            return
        begin = 0
        offset = source.ctypes.data - content.ctypes.data
        while begin < len(source):
            window = (offset + begin) // self._window_bytes
            end = min(len(source), (window + 1) * self._window_bytes - offset)
            yield begin, end, self._ensure(content, window)
            begin = end

    def lock_ahead(
        self, sources: Iterable[NDArray[np.uint8]], enter_thread: Callable[[], None]
    ) -> None:
        """Lock the windows of ``sources`` on a thread of its own, in their order. Once.

        It ends when the driver fails; whoever copies next is told so.
        """

        def run() -> None:
            with contextlib.suppress(RuntimeError):
                enter_thread()
                for source in sources:
                    for _ in self.spans(source):
                        if self._closed:
                            return

        if self._ahead is None:
            self._ahead = threading.Thread(target=run, name="moechat-page-lock", daemon=True)
            self._ahead.start()

    def close(self) -> None:
        """Unlock everything. No copy may be under way."""
        self._closed = True
        if self._ahead is not None:
            self._ahead.join()
        with self._lock:
            for address, window in self._windows.items():
                if window.locked:
                    self._page_lock.unlock(address)
            self._windows = {}
            self.registered_bytes = 0

    def _ensure(self, content: NDArray[np.uint8], number: int) -> bool:
        address = content.ctypes.data + number * self._window_bytes
        with self._lock:
            known = self._windows.get(address)
            if known is None:
                size = min(self._window_bytes, len(content) - number * self._window_bytes)
                size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE  # a mapping has whole pages
                window = self._windows[address] = _Window(content, size)
                fits = self.registered_bytes + size <= self._limit_bytes
                self.registered_bytes += size if fits else 0
        if known is not None:
            known.done.wait()
            return known.locked
        # Not under the lock: others ask for windows that are there, and this takes a while.
        try:
            window.locked = fits and self._page_lock.lock(address, size)
        finally:
            window.done.set()
            if fits and not window.locked:
                with self._lock:
                    self.registered_bytes -= size
        return window.locked


def _mapped_file(source: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
    """The whole file that ``source`` is a part of; None for other memory."""
    content = source
    while isinstance(content.base, np.ndarray):
        content = content.base
    owner = content.base.obj if isinstance(content.base, memoryview) else content.base
    return content if isinstance(owner, mmap.mmap) else None
