"""Copies of sessions' KV caches on a torch device; the native caches stay the truth.

Every layer is one tensor of slabs, a slab a session, so that a step finds the slots of its rows by
numbers in device memory. Shapes: S slabs, C slots of one, W elements of a slot, L layers.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch  # type: ignore[import-not-found, unused-ignore]
from numpy.typing import NDArray

from moechat.decode.gpu.host_pieces import HostPieces, bytes_of
from moechat.errors import DoesNotFit
from moechat.kv.cache import KVCache

Int32 = NDArray[np.int32]
_LEAST_SLOTS = 256
_WINDOW_SLACK = 2048  # slots after which a sliding window's copy is taken anew


@dataclass
class Mirror:
    """What a slab holds of one session: native slots [first, end) of each layer, from row 0 on."""

    slab: int
    epoch: int
    first_L: Int32
    end_L: Int32
    used: int = field(default=0)  # when it was asked for last
    fresh: bool = field(default=False)  # nobody but steps has written since it was filled


class DeviceCaches:
    """Slabs of all sessions that decode on one device. Used by the decode thread alone.

    Slab 0 belongs to nobody: rows that only fill a batch up write there. ``version`` rises when
    the tensors have moved, so that graphs that hold their addresses are captured again.
    """

    def __init__(
        self,
        windows: Sequence[int],
        width: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        limit_bytes: int | None = None,
    ) -> None:
        self.version = 0
        self._windows, self._width = tuple(windows), width
        self._device, self._dtype, self._limit_bytes = device, dtype, limit_bytes
        self._pieces = HostPieces(device)
        self._slabs, self._slots, self._clock = 2, _LEAST_SLOTS, 0
        self._mirrors: weakref.WeakKeyDictionary[KVCache, Mirror] = weakref.WeakKeyDictionary()
        self.slots_SCW = [self._allocate(layer, 2, _LEAST_SLOTS) for layer in range(len(windows))]

    def sync(self, caches: Sequence[KVCache]) -> list[Mirror]:
        """Bring the copies of all caches of a step up to date. They were reserved and have room."""
        mirrors = [self._mirrors[cache] for cache in caches]
        limit_L = [slots_SCW.shape[1] for slots_SCW in self.slots_SCW]
        for cache, mirror in zip(caches, mirrors):
            has_room = bool((mirror.end_L - mirror.first_L < limit_L).all())
            if not (mirror.fresh and has_room and mirror.epoch == cache.epoch):
                self._fill(cache, mirror)
                mirror.fresh = True
        return mirrors

    def has_room(self, caches: Sequence[KVCache]) -> bool:
        """Whether all of them are reserved and one slot more fits each."""
        longest = self._longest(caches)
        return longest < self._slots and all(cache in self._mirrors for cache in caches)

    def truncated(self, cache: KVCache) -> None:
        """``cache`` was truncated just now: what is left of it, is left of the copy."""
        mirror = self._mirrors.get(cache)
        if mirror is None:
            return
        if mirror.epoch != cache.epoch - 1:  # another truncation was not told
            mirror.end_L = mirror.first_L.copy()
        mirror.epoch = cache.epoch
        self.clip(cache)

    def clip(self, cache: KVCache) -> None:
        """Forget slots that the native cache has no longer: a step was taken back."""
        mirror = self._mirrors.get(cache)
        if mirror is not None:
            mirror.fresh = False
            left_L = [cache.num_slots(layer) for layer in range(cache.num_layers)]
            mirror.end_L = np.minimum(mirror.end_L, np.array(left_L, np.int32))

    def appended(self, mirror: Mirror) -> None:
        """A step wrote one slot more to the slab and to the native cache, in every layer."""
        mirror.end_L += 1

    def visible(self, cache: KVCache, mirror: Mirror, position: int) -> tuple[Int32, Int32]:
        """(begin [L], own [L]): rows of the slab that the token at ``position`` sees.

        From begin up to own, which is the row that its own slot is going to be.
        """
        own_L = mirror.end_L - mirror.first_L
        begin_L = np.zeros_like(own_L)
        for layer, window in enumerate(self._windows):
            if window:
                first = _first_visible(cache, layer, position - window + 1)
                begin_L[layer] = max(0, first - int(mirror.first_L[layer]))
        return begin_L, own_L

    def _fill(self, cache: KVCache, mirror: Mirror) -> None:
        if mirror.epoch != cache.epoch:
            mirror.end_L, mirror.epoch = mirror.first_L.copy(), cache.epoch
        with self._pieces.copying():
            for layer, slots_SCW in enumerate(self.slots_SCW):
                count, held = cache.num_slots(layer), cache.first_slot(layer)
                first, end = int(mirror.first_L[layer]), int(mirror.end_L[layer])
                overflows = count + 1 - first > slots_SCW.shape[1]
                if held > end or overflows or (first == end and first != held) or held < first:
                    first = end = held
                if end < count:
                    there = slots_SCW[mirror.slab, end - first : count - first]
                    rows = cache.read(layer, end, count).reshape(-1).view(np.uint8)
                    for _ in self._pieces.copy(bytes_of(there), rows):
                        pass
                mirror.first_L[layer], mirror.end_L[layer] = first, count

    def reserve(self, caches: Sequence[KVCache]) -> None:
        """Slabs for all that decode at once, and slots for the longest and one more.

        Whatever else writes to the caches does so before. No step may be under way: the tensors may
        move. Raises DoesNotFit when the limit is too low.
        """
        self._clock += 1
        slots, slabs = self._slots, self._slabs
        while self._longest(caches) >= slots:
            slots *= 2
        known = {id(cache) for cache in (*self._mirrors, *caches)}
        while slabs <= len(caches) or (slabs <= len(known) and self._fits(slabs * 2, slots)):
            slabs *= 2
        least = max(2, 1 << len(caches).bit_length())
        if not self._fits(slabs, slots) and self._fits(least, slots):  # the idle ones give way
            slabs = least
            self._mirrors.clear()
        if (slabs, slots) != (self._slabs, self._slots):
            self._resize(slabs, slots)
        for cache in caches:
            if cache in self._mirrors:
                self._mirrors[cache].used, self._mirrors[cache].fresh = self._clock, False
        for cache in caches:
            if cache not in self._mirrors:
                self._mirrors[cache] = self._new_mirror(cache)

    def _longest(self, caches: Sequence[KVCache]) -> int:
        full = [layer for layer, window in enumerate(self._windows) if not window]
        return max((cache.num_slots(layer) for cache in caches for layer in full), default=0)

    def _new_mirror(self, cache: KVCache) -> Mirror:
        free = set(range(1, self._slabs)) - {mirror.slab for mirror in self._mirrors.values()}
        if free:
            slab = min(free)
        else:  # the one that was idle for the longest gives way
            old, mirror = min(self._mirrors.items(), key=lambda item: item[1].used)
            slab = mirror.slab
            del self._mirrors[old]
        none_L = np.zeros(len(self._windows), np.int32)
        return Mirror(slab, cache.epoch, none_L, none_L.copy(), self._clock)

    def _resize(self, slabs: int, slots: int) -> None:
        """Slabs of sessions that are known stay as they are, also when DoesNotFit is raised."""
        if not self._fits(slabs, slots):
            raise self._does_not_fit(slabs, slots)
        self.version += 1
        for layer, old in enumerate(self.slots_SCW):
            try:
                new = self._allocate(layer, slabs, slots)
            except torch.OutOfMemoryError:  # only layers before have their new size
                self._slabs = min(self._slabs, slabs)
                raise self._does_not_fit(slabs, slots) from None
            both = tuple(slice(min(sizes)) for sizes in zip(old.shape[:2], new.shape))
            new[both] = old[both]
            self.slots_SCW[layer] = new
        self._slabs, self._slots = slabs, slots

    def _does_not_fit(self, slabs: int, slots: int) -> DoesNotFit:
        return DoesNotFit(
            "the KV caches of the sessions that decode do not fit the device's memory",
            f"they need {self._bytes(slabs, slots)} bytes",
            "Fewer sessions at once, a shorter context, or decode on the CPU",
        )

    def _layer_slots(self, layer: int, slots: int) -> int:
        window = self._windows[layer]
        return window + _WINDOW_SLACK if window else slots

    def _allocate(self, layer: int, slabs: int, slots: int) -> torch.Tensor:
        shape = (slabs, self._layer_slots(layer, slots), self._width)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def _bytes(self, slabs: int, slots: int) -> int:
        rows = sum(self._layer_slots(layer, slots) for layer in range(len(self._windows)))
        return int(slabs * rows * self._width * self._dtype.itemsize)

    def _fits(self, slabs: int, slots: int) -> bool:
        limit_bytes = self._limit_bytes
        return limit_bytes is None or self._bytes(slabs, slots) <= limit_bytes


def _first_visible(cache: KVCache, layer: int, position: int) -> int:
    """The first slot of a layer whose position is at least ``position``."""
    first, count = cache.first_slot(layer), cache.num_slots(layer)
    if count == cache.num_tokens(layer):  # nothing was dropped: slots are positions
        return min(max(first, position), count)
    held = cache.native.positions(layer, first, count)
    return first + int(np.searchsorted(held, position))
