"""Tensors that one lane makes and others read, from device to device.

The reader copies, on streams of its own: the host waits only until the other lane has asked its
device for the tensor, never for the device itself. Where the driver lets a GPU read another's
memory the copy is direct; else it goes through page-locked host memory, a piece at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import torch  # type: ignore[import-not-found, unused-ignore]

from moechat.prefill.gpu.lanes import LaneStopped

_cuda: Any = torch.cuda  # parts of it have no types
PIECE_BYTES = 8 << 20  # of one copy by way of the host: the link is shared with the weights
HOST_BUFFERS = 4


class Route(Protocol):
    """The way from one lane's device to another's. One thread uses it, the reader's."""

    def copy(self, out: torch.Tensor, source: torch.Tensor, ready: Any) -> Any:
        """``source``, there from the mark ``ready`` on, to ``out``; both contiguous, of one type.

        Returns the mark of its end, which the reader's stream does not wait for.
        """


# By the numbers of the lanes, source and target.
Routes: TypeAlias = "dict[tuple[int, int], Route]"


class SameDevice:
    """Two lanes on one device: an ordinary copy on the reader's stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def copy(self, out: torch.Tensor, source: torch.Tensor, ready: Any) -> Any:
        """As in Route."""
        if ready is not None:
            _cuda.current_stream(self._device).wait_event(ready)
        out.copy_(source)
        return mark(self._device)


class PeerAccess:
    """The reader's GPU reads the other's memory."""

    def __init__(self, source: torch.device, target: torch.device) -> None:
        self._target = target
        self._send, self._receive = _cuda.Stream(source), _cuda.Stream(target)

    def copy(self, out: torch.Tensor, source: torch.Tensor, ready: Any) -> Any:
        """As in Route."""
        # The memory of ``out`` was another tensor's before.
        self._receive.wait_stream(_cuda.current_stream(self._target))
        self._send.wait_event(ready)
        with _cuda.stream(self._send), _cuda.stream(self._receive):
            out.copy_(source, non_blocking=True)
        done = _cuda.Event()
        done.record(self._receive)
        return done


class ByHost:
    """Pieces through page-locked buffers; one comes in while the one before goes out."""

    def __init__(
        self, source: torch.device, target: torch.device, piece_bytes: int = PIECE_BYTES
    ) -> None:
        self._target = target
        self._send, self._receive = _cuda.Stream(source), _cuda.Stream(target)
        self._piece_bytes = piece_bytes
        self._buffers: list[tuple[torch.Tensor, Any, Any]] = []
        self._turn = 0

    def copy(self, out: torch.Tensor, source: torch.Tensor, ready: Any) -> Any:
        """As in Route."""
        self._receive.wait_stream(_cuda.current_stream(self._target))
        self._send.wait_event(ready)
        target_bytes, source_bytes = _bytes(out), _bytes(source)
        for begin in range(0, len(target_bytes), self._piece_bytes):
            end = min(len(target_bytes), begin + self._piece_bytes)
            buffer, filled, emptied = self._next_buffer()
            piece = buffer[: end - begin]
            self._send.wait_event(emptied)
            with _cuda.stream(self._send):
                piece.copy_(source_bytes[begin:end], non_blocking=True)
            filled.record(self._send)
            self._receive.wait_event(filled)
            with _cuda.stream(self._receive):
                target_bytes[begin:end].copy_(piece, non_blocking=True)
            emptied.record(self._receive)
        done = _cuda.Event()
        done.record(self._receive)
        return done

    def _next_buffer(self) -> tuple[torch.Tensor, Any, Any]:
        if not self._buffers:
            self._buffers = [
                (host_buffer(self._piece_bytes), _cuda.Event(), _cuda.Event())
                for _ in range(HOST_BUFFERS)
            ]
        self._turn = (self._turn + 1) % HOST_BUFFERS
        return self._buffers[self._turn]


def host_buffer(size_bytes: int) -> torch.Tensor:
    """Page-locked uint8, which copies of either GPU may use."""
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)


def mark(device: torch.device) -> Any:
    """Reached when the work so far of the current stream is done; None off CUDA: it is done."""
    if device.type != "cuda":
        return None
    event = _cuda.Event(blocking=True)  # who waits for it leaves the CPU to others
    event.record(_cuda.current_stream(device))
    return event


class Exchange:
    """What the lanes of one span offer each other in the layer that runs."""

    def __init__(self, devices: Sequence[torch.device], routes: Routes | None = None) -> None:
        """``routes`` between them, of one span at a time; None: new ones."""
        self._devices = list(devices)
        self._routes = routes_between(devices) if routes is None else routes
        self._changed = threading.Condition()
        self._offers: dict[tuple[int, str], tuple[torch.Tensor, Any]] = {}
        self._copies: list[tuple[int, int, Any]] = []  # which lanes read which, and the end
        self._stopped = False

    def offer(self, lane: int, name: str, tensor: torch.Tensor) -> None:
        """Others may read the contiguous ``tensor``; until end_layer() nobody may write to it."""
        ready = mark(self._devices[lane])
        with self._changed:
            self._offers[lane, name] = tensor, ready
            self._changed.notify_all()

    def fetch(self, lane: int, source: int, name: str, rows: slice, out: torch.Tensor) -> Any:
        """Start to copy ``rows`` of what the lane ``source`` offers to ``out``, of ``lane``.

        The host waits until it is offered. Returns what arrived() takes; until then ``out`` is not
        to be touched. Raises LaneStopped after stop().
        """
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or (source, name) in self._offers)
            if self._stopped:
                raise LaneStopped("another lane of the prefill failed")
            tensor, ready = self._offers[source, name]
        if not len(out):
            return None
        done = self._routes[source, lane].copy(out, tensor[rows], ready)
        with self._changed:
            self._copies.append((lane, source, done))
        return done

    def arrived(self, lane: int, done: Any) -> None:
        """Later work of the lane comes after the copy that fetch() started."""
        if done is not None:
            _cuda.current_stream(self._devices[lane]).wait_event(done)

    def stop(self) -> None:
        """Lanes that wait, or will, raise LaneStopped."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def end_layer(self) -> None:
        """No lane runs: forget the offers.

        Before memory of either end of a copy becomes another tensor's, the copy ends on the device,
        if its lane failed, too.
        """
        for *ends, done in self._copies:
            for lane in ends:
                self.arrived(lane, done)
        self._offers, self._copies = {}, []


def routes_between(devices: Sequence[torch.device], *, peer_access: bool = True) -> Routes:
    """Every lane's way to every other's.

    To be kept: torch has 32 streams a device, and hands the same out again, a copy stream's, too.
    ``peer_access`` False: copies between GPUs go by way of the host even where none must.
    """
    return {
        (source, target): _route(devices[source], devices[target], peer_access)
        for source in range(len(devices))
        for target in range(len(devices))
        if source != target
    }


def _route(source: torch.device, target: torch.device, peer_access: bool) -> Route:
    if source.type != "cuda" or source == target:
        return SameDevice(target)
    if peer_access and _cuda.can_device_access_peer(source, target):
        return PeerAccess(source, target)
    return ByHost(source, target)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
