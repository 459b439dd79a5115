"""What is copied to a device in one go: many stored matrices, laid out in one slot's memory.

Scales of FP8 blocks are a few kilobytes an expert, where a copy costs more than its bytes: what is
small is gathered in host memory first, and is one copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch  # type: ignore[import-not-found, unused-ignore]

from moechat.gpu_weights.stored import Bytes, Layout, StoredMatrix
from moechat.prefill.gpu.transfer import Transfer

SMALL_BYTES = 64 << 10
_ALIGNMENT_BYTES = 256


@dataclass(frozen=True, slots=True)
class _Region:
    """Bytes [begin, begin + count * each) of a slot's large or small memory."""

    small: bool
    begin: int
    count: int
    each: int


@dataclass(slots=True)
class _Area:
    """One of a slot's two memories as a parcel fills it."""

    size_bytes: int = 0
    copies: list[tuple[int, Bytes]] = field(default_factory=list)

    def place(self, arrays: Sequence[Bytes]) -> int:
        """Contiguous room for arrays of one size; where it begins."""
        begin = self.size_bytes
        each = len(arrays[0])
        self.copies.extend((begin + i * each, array) for i, array in enumerate(arrays))
        end = begin + len(arrays) * each
        self.size_bytes = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return begin


@dataclass(slots=True)
class Slot:
    """Device memory for one parcel at a time. ``small`` is filled from ``host_small``.

    Marks (transfer.Transfer): ``ready`` when its copies are done, ``free`` when its last use is.
    """

    memory: torch.Tensor
    small: torch.Tensor
    host_small: torch.Tensor
    started: object = None
    ready: object = None
    free: object = None


class Parcel:
    """Parts by name, each some matrices of one layout."""

    def __init__(self, parts: dict[str, list[StoredMatrix]]) -> None:
        self._large, self._small = _Area(), _Area()
        self._regions: dict[str, tuple[Layout, _Region, _Region | None]] = {}
        for name, matrices in parts.items():
            scales = [matrix.scale for matrix in matrices if matrix.scale is not None]
            data = self._place([matrix.data for matrix in matrices], self._large)
            small = bool(scales) and len(scales[0]) <= SMALL_BYTES
            scale = self._place(scales, self._small if small else self._large) if scales else None
            self._regions[name] = (matrices[0].layout, data, scale)

    @property
    def large_bytes(self) -> int:
        """Of the slot's memory."""
        return self._large.size_bytes

    @property
    def small_bytes(self) -> int:
        """Of the slot's small memory."""
        return self._small.size_bytes

    @property
    def stored_bytes(self) -> int:
        """What is copied, alignment not counted."""
        return sum(len(a) for area in (self._large, self._small) for _, a in area.copies)

    @property
    def sources(self) -> list[Bytes]:
        """What is copied straight from the files."""
        return [array for _, array in self._large.copies]

    def fill(self, slot: Slot, transfer: Transfer) -> None:
        """Start the copies into a slot whose earlier ones are done, as far as the host wrote."""
        for begin, array in self._small.copies:
            slot.host_small.numpy()[begin : begin + len(array)] = array
        size = self._small.size_bytes
        if size:
            transfer.copy_small(slot.small[:size], slot.host_small[:size])
        transfer.copy(slot.memory, _merged(self._large.copies))

    def parts(self, slot: Slot) -> Iterator[tuple[str, Layout, torch.Tensor, torch.Tensor | None]]:
        """Name, layout, data [n, bytes] and scale [n, bytes] of each part in a filled slot."""
        for name, (layout, data, scale) in self._regions.items():
            yield name, layout, _view(slot, data), _view(slot, scale) if scale else None

    def _place(self, arrays: Sequence[Bytes], area: _Area) -> _Region:
        return _Region(area is self._small, area.place(arrays), len(arrays), len(arrays[0]))


def _view(slot: Slot, region: _Region) -> torch.Tensor:
    memory = slot.small if region.small else slot.memory
    return memory[region.begin :][: region.count * region.each].view(region.count, region.each)


def _merged(copies: list[tuple[int, Bytes]]) -> Iterator[tuple[int, Bytes]]:
    """Copies whose ends meet, on both sides, as one: experts of one stored tensor."""
    number = 0
    while number < len(copies):
        begin, array = copies[number]
        end = number + 1
        address, size = array.ctypes.data, len(array)
        while end < len(copies) and array.base is not None:
            next_begin, after = copies[end]
            meets = next_begin == begin + size and after.ctypes.data == address + size
            if not meets or after.base is not array.base:
                break
            size += len(after)
            end += 1
        yield begin, array if end == number + 1 else _extended(array, size)
        number = end


def _extended(array: Bytes, size: int) -> Bytes:
    """``size`` bytes from where ``array`` begins, in the same memory."""
    whole = array.base
    assert isinstance(whole, np.ndarray)
    flat: Bytes = whole.reshape(-1).view(array.dtype)
    begin = array.ctypes.data - flat.ctypes.data
    return flat[begin : begin + size]
