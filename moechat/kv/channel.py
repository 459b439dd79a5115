"""The way from prefill to decode: KV packets, bounded, and control messages in the same order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from moechat.errors import EngineClosed
from moechat.kv.packet import KVPacket

Message = TypeVar("Message")


class Channel(Generic[Message]):
    """A queue in which at most ``capacity`` packets wait; control messages never block.

    ``on_arrival`` is called (by the sender) after each message.
    """

    def __init__(self, capacity: int, on_arrival: Callable[[], None] = lambda: None) -> None:
        self._capacity = capacity
        self._on_arrival = on_arrival
        self._messages: deque[KVPacket | Message] = deque()
        self._num_packets = 0
        self._closed = False
        self._changed = threading.Condition()

    def send_packet(self, packet: KVPacket, cancelled: Callable[[], bool]) -> bool:
        """Wait for room and send; False, with nothing sent, once ``cancelled()`` is true."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_packets < self._capacity or cancelled())
            if cancelled():
                return False
            self._messages.append(packet)
            self._num_packets += 1
            self._changed.notify_all()
        self._on_arrival()
        return True

    def send(self, message: Message) -> None:
        """Send a control message at once. Raises EngineClosed after close()."""
        with self._changed:
            if self._closed:
                raise EngineClosed("the engine was closed")
            self._messages.append(message)
            self._changed.notify_all()
        self._on_arrival()

    def close(self) -> None:
        """Refuse control messages from now on (EngineClosed); what waits can still be received."""
        with self._changed:
            self._closed = True

    def wake(self) -> None:
        """Make blocked senders look at their ``cancelled()`` again."""
        with self._changed:
            self._changed.notify_all()

    def receive(self, block: bool) -> KVPacket | Message | None:
        """The next message; None when there is none and ``block`` is false."""
        with self._changed:
            if block:
                self._changed.wait_for(lambda: bool(self._messages))
            if not self._messages:
                return None
            message = self._messages.popleft()
            if isinstance(message, KVPacket):
                self._num_packets -= 1
                self._changed.notify_all()
            return message
