"""Slots of device memory, and a thread that fills them ahead of what the forward pass asks for.

The thread goes through a plan in order. Each item has a ring of slots: the thread waits until one
is free, page-locks what the item needs and starts its copies. The forward pass takes items in the
same order; asking for another one starts the plan again from there.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch  # type: ignore[import-not-found, unused-ignore]

from moechat.errors import DoesNotFit
from moechat.prefill.gpu.parcel import Parcel, Slot
from moechat.prefill.gpu.transfer import Transfer

# Spans of copies whose times are not asked for yet: they may be under way.
_OPEN_SPANS = 64

LINEARS = -1
Key = tuple[int, int]  # layer, and LINEARS or the number of a group of experts


class Ring:
    """Slots of one size, made at their first use."""

    def __init__(
        self,
        transfer: Transfer,
        device: torch.device,
        num_slots: int,
        large_bytes: int,
        small_bytes: int,
    ) -> None:
        self._transfer, self._device = transfer, device
        self._sizes = large_bytes, small_bytes
        self._unmade = num_slots
        self._free: deque[Slot] = deque()

    @property
    def has_free(self) -> bool:
        """Whether ``get`` has one."""
        return bool(self._free) or self._unmade > 0

    def get(self) -> Slot:
        """A slot that the host may use; on the device its last use may still be under way."""
        if self._free:
            return self._free.popleft()
        large, small = (
            torch.empty(size, dtype=torch.uint8, device=self._device) for size in self._sizes
        )
        self._unmade -= 1
        slot = Slot(large, small, self._transfer.host_buffer(self._sizes[1]))
        # The memory may have been another tensor's a moment ago.
        slot.free = self._transfer.compute_mark()
        return slot

    def put(self, slot: Slot) -> None:
        """Give one back, its ``free`` mark set."""
        self._free.append(slot)

    def clear(self) -> None:
        """Let go of the slots that are here; there are no more."""
        self._free.clear()
        self._unmade = 0


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One parcel of a plan. ``once``: it stays where it is put, and is not copied again."""

    key: Key
    parcel: Parcel
    ring: Ring
    once: bool = False


class Feeder:
    """The thread, the plan, and what has been delivered. One forward pass at a time uses it."""

    def __init__(self, transfer: Transfer, plan: Sequence[Item]) -> None:
        self._transfer = transfer
        self._plan = list(plan)
        self._changed = threading.Condition()
        self._ahead: deque[Item] = deque()  # not taken yet, in order
        self._fed = 0  # of these, delivered or under way
        self._delivered: dict[Key, Slot] = {}
        self._loaded: set[Key] = set()
        self._run = 0
        self._stopped = False
        self._error: Exception | None = None
        self._spans: deque[tuple[object, object]] = deque()
        self._span_seconds = 0.0
        self.copied_bytes = 0
        self._thread = threading.Thread(target=self._feed, name="moechat-weights", daemon=True)
        self._thread.start()

    def prepare(self, layer: int) -> None:
        """See to it that the layer's items are on their way."""
        with self._changed:
            coming = [item for item in self._plan if item.key[0] >= layer and self._wanted(item)]
            if not coming:
                return
            following = self._ahead[0].key[0] if self._ahead and self._error is None else None
            if following is None or not layer - 1 <= following <= coming[0].key[0]:
                self._restart(coming[0].key)

    def take(self, key: Key) -> Slot:
        """The item's slot, its copies started (``ready``). Raises DoesNotFit.

        After an error, of any item that was to come, whatever is asked for next is a new start.
        """
        with self._changed:
            if not self._ahead or self._ahead[0].key != key:
                self._restart(key)
            self._changed.wait_for(lambda: key in self._delivered or self._error or self._stopped)
            if (error := self._error) is not None:
                self._forget()
                if isinstance(error, torch.OutOfMemoryError):
                    raise DoesNotFit(
                        "the ring of weights does not fit into the GPU's memory",
                        (str(error).splitlines() or [""])[0],
                        "Lower --gpu-memory, or use --device cpu",
                    ) from error
                raise error
            if self._stopped:
                raise RuntimeError("the stream of weights was closed")
            item = self._ahead.popleft()
            self._fed -= 1
            if item.once:
                self._loaded.add(key)
            return self._delivered.pop(key)

    def give_back(self, ring: Ring, slot: Slot) -> None:
        """A slot that was taken; its last use has been asked for."""
        slot.free = self._transfer.compute_mark()
        with self._changed:
            ring.put(slot)
            self._changed.notify_all()

    def copy_seconds(self) -> float:
        """Of all items so far, on the copies' own clock; waits for those under way."""
        with self._changed:
            self._sum_spans(0)
            return self._span_seconds

    def close(self) -> None:
        """End the thread. Copies that were started go on until the transfer is closed."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()

    def clear(self) -> None:
        """After close() and the last copy: let go of the slots and of where they came from."""
        for item in self._plan:
            item.ring.clear()
        self._plan, self._delivered = [], {}
        self._ahead.clear()

    def _wanted(self, item: Item) -> bool:
        return item.key not in self._loaded

    def _restart(self, key: Key) -> None:
        """From ``key`` on. What was delivered and not taken is dropped."""
        self._forget()
        self._ahead = deque(i for i in self._plan if i.key >= key and self._wanted(i))
        if not self._ahead or self._ahead[0].key != key:
            raise KeyError(key)
        self._changed.notify_all()

    def _forget(self) -> None:
        """What is ahead, and an error on the way there."""
        for item in list(self._ahead)[: self._fed]:
            slot = self._delivered.pop(item.key, None)
            if slot is not None:  # else it is under way, and its thread gives it back
                item.ring.put(slot)
        self._ahead.clear()
        self._fed = 0
        self._run += 1
        self._error = None

    def _next(self) -> Item | None:
        """The item that is to be copied now, if there is one and room for it."""
        if self._fed < len(self._ahead) and self._error is None:
            item = self._ahead[self._fed]
            return item if item.ring.has_free else None
        return None

    def _feed(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._next() is not None)
                item = None if self._stopped else self._next()
                if item is None:
                    return
                run = self._run
                self._fed += 1
            slot, error = None, None
            try:
                self._transfer.enter_thread()
                with self._changed:
                    slot = item.ring.get()
                self._copy(item.parcel, slot)
            except Exception as caught:  # whoever waits for the item gets it
                error = caught
            with self._changed:
                if run == self._run and error is None and slot is not None:
                    self._delivered[item.key] = slot
                elif slot is not None:
                    item.ring.put(slot)
                if run == self._run and error is not None:
                    self._error = error
                self._changed.notify_all()
            del item, slot, error  # an error's traceback has what was on the device

    def _copy(self, parcel: Parcel, slot: Slot) -> None:
        if slot.ready is not None:
            self._transfer.host_waits(slot.ready)  # host_small is about to be written again
        self._transfer.copies_wait(slot.free)
        slot.started = self._transfer.copy_mark()
        parcel.fill(slot, self._transfer)
        slot.ready = self._transfer.copy_mark()
        with self._changed:
            self._spans.append((slot.started, slot.ready))
            self.copied_bytes += parcel.stored_bytes
            self._sum_spans(_OPEN_SPANS)

    def _sum_spans(self, left: int) -> None:
        while len(self._spans) > left:
            self._span_seconds += self._transfer.seconds(*self._spans.popleft())
