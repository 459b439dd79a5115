"""A talk as data: token ids and KV, in memory and in a file, to go on from bit for bit.

A file is MAGIC, the header's length and CRC-32 (uint32 each), the header (JSON), then arrays
without gaps: the ids (int32), and of each layer, the draft layer last, positions (int32 [n]) and
slots ([n, W], uint16 or float32), those that it kept aside first. Everything is little-endian. The
header has a checksum of the ids and the checksum of every packet, so that no byte of a file can
change unnoticed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from moechat.errors import DoesNotFit, MoechatError, PacketRefused, Usage
from moechat.kv.cache import PAGE_SLOTS, LayerSlots
from moechat.kv.layout import Kind, KVLayout, Part
from moechat.kv.packet import TIER_NATIVE, VERSION, KVPacket, verify
from moechat.models.spec import ModelSpec
from moechat.weights.fingerprint import files_fingerprint
from moechat.whole_file import whole_file

MAGIC = b"moechkv\0"
FORMAT = 1
_LENGTHS = struct.Struct("<8sII")
_HEADER_LIMIT_BYTES = 1_000_000
_LIMIT = 2**31 - 1  # of positions and counts
_WIDTH_LIMIT = 2**20  # kMaxSlotElements of cpp/kv/cache.h
_DTYPES: dict[str, np.dtype[Any]] = {"bf16": np.dtype("<u2"), "exact": np.dtype("<f4")}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, eq=False)
class KVSnapshot:
    """What ``Session.snapshot()`` gives and ``Engine.session()`` takes.

    ``ids`` int32 [tokens]; ``marked``: where the last answer began; ``draft``: the slots of the
    multi-token-prediction layer, None without speculation.
    """

    model: str
    compute: str
    layout: KVLayout
    windows: tuple[int, ...]
    ids: NDArray[np.int32]
    marked: int
    layers: tuple[LayerSlots, ...]
    draft: LayerSlots | None

    @property
    def num_bytes(self) -> int:
        """Of KV, without positions."""
        return sum(slots.packet.num_bytes for slots in self._all_slots())

    def check(self, model: str, spec: ModelSpec, compute: str) -> None:
        """Raise PacketRefused unless it is of this model and compute type, and plausible."""
        if self.model != model:
            raise _refused("it is of another model, or of another version of this one")
        if self.compute != compute:
            raise _refused(f"its KV is of compute type {self.compute}, not {compute}")
        windows = tuple(layer.window for layer in spec.layers)
        if self.layout != KVLayout.of(spec) or self.windows != windows:
            raise _refused("its KV slots are of another layout")
        if reason := self._damage(spec):
            raise _refused(reason)

    def save(self, path: str | Path) -> None:
        """Write a file, whole or not at all; an older one is replaced.

        Raises DoesNotFit when the disk is full, MoechatError for what else the system refuses.
        """
        try:
            with whole_file(Path(path), durable=True) as file:
                self._write(file)
        except OSError as error:
            what, why = f"{path} cannot be written", error.strerror or str(error)
            if error.errno in _FULL:
                raise DoesNotFit(what, why, f"The KV takes {self.num_bytes} bytes") from None
            raise MoechatError(what, why) from None

    @classmethod
    def load(cls, path: str | Path) -> KVSnapshot:
        """Read a file. Raises PacketRefused for one that is damaged or no snapshot, and Usage for
        one that cannot be read."""
        try:
            if not os.path.isfile(path):
                raise Usage(f"{path} cannot be read", "there is no such file")
            with open(path, "rb") as file:
                return cls._read(file, os.fstat(file.fileno()).st_size)
        except OSError as error:
            raise Usage(f"{path} cannot be read", error.strerror or str(error)) from None

    def _all_layers(self) -> Iterator[LayerSlots]:
        yield from self.layers
        if self.draft is not None:
            yield self.draft

    def _all_slots(self) -> Iterator[LayerSlots]:
        for slots in self._all_layers():
            if slots.aside is not None:
                yield slots.aside
            yield slots

    def _damage(self, spec: ModelSpec) -> str:
        """What the checksums do not tell; "" for nothing."""
        if len(self.layers) != spec.num_layers:
            return "it lacks layers"
        if len(self.ids) and not 0 <= self.ids.min() <= self.ids.max() < spec.vocab_size:
            return "a token id is outside the vocabulary"
        end = self.layers[0].end
        if end > len(self.ids) or any(slots.end != end for slots in self.layers):
            return "its KV and its tokens do not belong together"
        if self.draft is not None and self.draft.end > max(end - 1, 0):
            return "the KV of its draft layer is ahead"
        for slots, window in zip(self._all_layers(), (*self.windows, 0)):
            if reason := _misplaced(slots, window):
                return reason
        return ""

    def _write(self, file: BufferedIOBase) -> None:
        ids = self.ids.astype("<i4")
        layers = [_entry(slots) for slots in self._all_layers()]
        header = json.dumps(
            {
                "format": FORMAT,
                "packets": VERSION,
                "model": self.model,
                "compute": self.compute,
                "parts": [asdict(part) for part in self.layout.parts],
                "windows": self.windows,
                "ids": len(ids),
                "ids_checksum": zlib.crc32(ids.tobytes()),
                "marked": self.marked,
                "layers": layers[: len(self.layers)],
                "draft": layers[-1] if self.draft is not None else None,
            }
        ).encode()
        file.write(_LENGTHS.pack(MAGIC, len(header), zlib.crc32(header)) + header)
        file.write(ids.tobytes())
        for slots in self._all_slots():
            if len(slots.packet.positions):
                file.write(np.ascontiguousarray(slots.packet.positions, "<i4").data)
                rows = slots.packet.payload[TIER_NATIVE]
                file.write(np.ascontiguousarray(rows, _DTYPES[self.compute]).data)

    @classmethod
    def _read(cls, file: BufferedIOBase, file_bytes: int) -> KVSnapshot:
        header = _read_header(file)
        try:
            compute, layout = header["compute"], _layout(header["parts"])
            dtype = _DTYPES[compute]
            num_ids, marked = _count(header["ids"]), _count(header["marked"])
            windows = tuple(_count(window) for window in header["windows"])
            draft = header["draft"]
            layers = [*header["layers"], *([] if draft is None else [draft])]
            entries = [_parse(layer) for layer in layers]
            ids_checksum = _count(header["ids_checksum"], 2**32)
            model = header["model"]
            if not isinstance(model, str) or len(header["layers"]) != len(windows):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise _refused("its header makes no sense") from None
        slot_bytes = 4 + dtype.itemsize * layout.width
        if (
            file.tell()
            + 4 * num_ids
            + sum(part[0] for entry in entries for part in entry) * slot_bytes
            != file_bytes
        ):
            raise _refused("it is cut, or longer than its header says")
        ids = _read_array(file, (num_ids,), np.dtype("<i4"))
        if zlib.crc32(ids.tobytes()) != ids_checksum:
            raise _refused("its tokens are damaged")
        slots = []
        for layer, entry in enumerate(entries):
            aside = _read_slots(file, layer, entry[1], layout, dtype) if len(entry) > 1 else None
            slots.append(_read_slots(file, layer, entry[0], layout, dtype, aside))
        last = slots.pop() if draft is not None else None
        return cls(model, compute, layout, windows, ids, marked, tuple(slots), last)


def model_fingerprint(spec: ModelSpec, files: Sequence[Path]) -> str:
    """Tells models apart, also those that differ in their weights' values only.

    Raises CheckpointDamaged when a file cannot be read any more.
    """
    text = repr(spec) + files_fingerprint(files)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _misplaced(slots: LayerSlots, window: int) -> str:
    """Why a layer's slots cannot stand where they are said to; "" when they can."""
    aside = slots.aside
    for part in (slots,) if aside is None else (slots, aside):
        positions = part.packet.positions
        if len(positions) and not part.begin <= positions[0] <= positions[-1] < part.end:
            return "its positions do not belong to its tokens"
        if part.first_slot % PAGE_SLOTS or not 0 <= part.first_slot <= part.begin:
            return "its slots are numbered wrongly"
    if slots.begin > (max(0, slots.end - window + 1) if window else 0):
        return "it lacks what a window shows"
    if aside is not None:
        count = len(aside.packet.positions)
        if not count or count % PAGE_SLOTS or aside.first_slot + count > slots.first_slot:
            return "its slots are numbered wrongly"
    return ""


def _entry(slots: LayerSlots) -> dict[str, Any]:
    """What the header says of a layer."""
    return {
        "slots": len(slots.packet.positions),
        "first_slot": slots.first_slot,
        "begin": slots.begin,
        "end": slots.end,
        "checksum": int(slots.packet.checksum),
        "aside": None if slots.aside is None else _entry(slots.aside),
    }


_Parsed = tuple[int, int, int, int, int]  # slots, first slot, begin, end, checksum


def _parse(entry: Any) -> list[_Parsed]:
    """Of a layer, and of what it kept aside. Raises KeyError, TypeError or ValueError."""
    slots, first_slot, begin, end = (
        _count(entry[name]) for name in ("slots", "first_slot", "begin", "end")
    )
    own = slots, first_slot, begin, end, _count(entry["checksum"], 2**64)
    if entry["aside"] is None:
        return [own]
    (aside,) = _parse(entry["aside"])
    return [own, aside]


def _refused(why: str) -> PacketRefused:
    return PacketRefused("the KV snapshot cannot be used", why)


def _read_header(file: BufferedIOBase) -> dict[str, Any]:
    start = file.read(_LENGTHS.size)
    if len(start) < _LENGTHS.size or not start.startswith(MAGIC):
        raise _refused("it is none, or its beginning is damaged")
    _, header_bytes, checksum = _LENGTHS.unpack(start)
    content = file.read(min(header_bytes, _HEADER_LIMIT_BYTES))
    if len(content) != header_bytes or zlib.crc32(content) != checksum:
        raise _refused("its header is cut or damaged")
    try:
        header = json.loads(content)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise _refused("its header makes no sense")
    if (header.get("format"), header.get("packets")) != (FORMAT, VERSION):
        raise _refused("another version of moechat wrote it")
    return header


def _count(value: object, limit: int = _LIMIT) -> int:
    if type(value) is not int or not 0 <= value <= limit:
        raise ValueError
    return value


def _layout(parts: Any) -> KVLayout:
    """Raises ValueError or TypeError for what is none."""
    known = {part["kind"] for part in parts} <= set(get_args(Kind))
    layout = KVLayout(
        tuple(Part(_count(part["begin"]), _count(part["width"]), part["kind"]) for part in parts)
    )
    if not known or layout.width > _WIDTH_LIMIT:
        raise ValueError
    return layout


def _read_array(file: BufferedIOBase, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    array = np.empty(shape, dtype)
    if array.size and file.readinto(array.data.cast("B")) != array.nbytes:
        raise _refused("it was cut while it was read")
    return array


def _read_slots(
    file: BufferedIOBase,
    layer: int,
    parsed: _Parsed,
    layout: KVLayout,
    dtype: np.dtype[Any],
    aside: LayerSlots | None = None,
) -> LayerSlots:
    count, first_slot, begin, end, checksum = parsed
    positions = _read_array(file, (count,), np.dtype("<i4"))
    rows = _read_array(file, (count, layout.width), dtype)
    tiers, centre = np.full(count, TIER_NATIVE, np.uint8), np.empty(0, np.float16)
    payload = {TIER_NATIVE: rows} if count else {}
    packet = KVPacket(VERSION, 0, 0, layer, positions, tiers, payload, {}, centre, checksum)
    verify(packet, layout)
    return LayerSlots(packet, first_slot, begin, end, aside)
