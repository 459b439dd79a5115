"""As much of torch.cuda as exchanges use: streams that do nothing until they are told to.

Copies of tensors are put off, too, in the stream that is current; then everything runs in an order
that a policy chooses, within what waits allow. What an exchange forgets to wait for shows.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class QueuedCuda:
    """The module; devices are known by their index."""

    def __init__(self, peers: bool) -> None:
        self.peers = peers
        self.streams: list[_Stream] = []
        self._default = {index: self.Stream(torch.device("cuda", index)) for index in range(3)}
        self._current: list[_Stream] = []

    def Stream(self, device: torch.device) -> _Stream:
        self.streams.append(_Stream(device))
        return self.streams[-1]

    def Event(self, **_: bool) -> _Event:
        return _Event()

    def current_stream(self, device: torch.device) -> _Stream:
        return self._default[device.index]

    def can_device_access_peer(self, source: torch.device, target: torch.device) -> bool:
        return self.peers

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        self._current.append(stream)
        yield
        self._current.pop()

    def put(self, operation: Callable[[], None], device: torch.device) -> None:
        """Work of a device's own stream."""
        self._default[device.index].queue.append(operation)

    def copy(self, target: torch.Tensor, source: torch.Tensor, **settings: Any) -> torch.Tensor:
        """Tensor.copy_: in the current stream. Between devices both ends wait for each other."""
        streams = list(self._current)
        assert streams, "a copy in the default stream"
        if len(streams) == 2:
            begin = _Event()
            begin.record(streams[1])
            streams[0].wait_event(begin)
        streams[0].queue.append(lambda: _COPY(target, source))
        if len(streams) == 2:
            end = _Event()
            end.record(streams[0])
            streams[1].wait_event(end)
        return target

    def run(self, seed: int) -> None:
        """Everything, the streams in an order of preference that the seed gives, or by chance."""
        chance = random.Random(seed)
        orders = list(itertools.permutations(self.streams)) if len(self.streams) < 6 else []
        order = orders[seed] if seed < len(orders) else None
        while any(stream.queue for stream in self.streams):
            ready = [stream for stream in order or self.streams if stream.may_go()]
            assert ready, "streams wait for each other"
            (ready[0] if order else chance.choice(ready)).step()


_COPY = torch.Tensor.copy_


class _Point:
    def __init__(self) -> None:
        self.reached = False

    def __call__(self) -> None:
        self.reached = True


class _Stream:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.queue: deque[Any] = deque()

    def wait_event(self, event: _Event) -> None:
        if event.point is not None:  # what was never recorded is not waited for
            self.queue.append(("wait", event.point))

    def wait_stream(self, other: _Stream) -> None:
        event = _Event()
        event.record(other)
        self.wait_event(event)

    def may_go(self) -> bool:
        if not self.queue:
            return False
        first = self.queue[0]
        return first[1].reached if isinstance(first, tuple) else True

    def step(self) -> None:
        first = self.queue.popleft()
        if not isinstance(first, tuple):
            first()


class _Event:
    def __init__(self) -> None:
        self.point: _Point | None = None

    def record(self, stream: _Stream) -> None:
        self.point = _Point()
        stream.queue.append(self.point)
