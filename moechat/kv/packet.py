"""KV packets: one layer's slots of one span of tokens, on their way from prefill to decode.

A packet owns its bytes and never points into a cache. Every token has a tier; the bytes of a tier's
tokens stand together in ``payload[tier]``, in token order, its scales in ``scales[tier]``.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moechat import _native
from moechat.errors import KVNotEncodable, PacketRefused
from moechat.kv.layout import KVLayout
from moechat.kv.tiers import DROPPED, Tier, coded_parts, tier_sizes

VERSION = 2
TIER_NATIVE = int(Tier.NATIVE)
PART_TOKENS = 512  # of a packet that is decoded in parts

_COMPUTE_DTYPES: dict[str, np.dtype[Any]] = {
    "bf16": np.dtype(np.uint16),
    "exact": np.dtype(np.float32),
}
_SCALED = (Tier.INT8, Tier.K8V4, Tier.INT4)


@dataclass(frozen=True)
class KVPacket:
    """One layer of one span. Shapes: n tokens, W elements a slot.

    ``epoch`` is raised by cancel and rewind: a packet of an older epoch is stale. ``tiers`` (uint8
    [n]) holds a Tier a token. ``payload`` has the tiers that occur and no others: of NATIVE
    [tokens, W] in the compute type (uint16 for BF16, or float32), else uint8 [tokens, bytes].
    ``scales[tier]`` (float16 [tokens, quantised parts]) of the tiers that have scales. ``centre``
    (float16 [C], may be empty) was taken off the first C elements of quantised parts.
    """

    version: int
    session: int
    epoch: int
    layer: int
    positions: NDArray[np.int32]
    tiers: NDArray[np.uint8]
    payload: dict[int, NDArray[Any]]
    scales: dict[int, NDArray[Any]]
    centre: NDArray[np.float16]
    checksum: int

    @property
    def num_bytes(self) -> int:
        """Payload, scales and centre: what a budget counts."""
        arrays = [*self.payload.values(), *self.scales.values(), self.centre]
        return sum(array.nbytes for array in arrays)

    @property
    def header_bytes(self) -> int:
        """Positions and tiers."""
        return self.positions.nbytes + self.tiers.nbytes


def native_packet(
    session: int, epoch: int, layer: int, positions: NDArray[np.int32], rows: NDArray[Any]
) -> KVPacket:
    """A packet whose tokens all are NATIVE. ``rows`` [n, W] is kept, not copied."""
    tiers = np.full(len(positions), TIER_NATIVE, np.uint8)
    payload = {TIER_NATIVE: rows} if len(positions) else {}
    return sealed(session, epoch, layer, positions, tiers, payload, {}, np.empty(0, np.float16))


def encode_packet(
    session: int,
    epoch: int,
    layer: int,
    positions: NDArray[np.int32],
    rows: NDArray[Any],
    tiers: NDArray[np.uint8],
    layout: KVLayout,
    *,
    centre_keys: bool = False,
) -> KVPacket:
    """A packet of ``rows`` [n, W] (uint16 BF16 bits or float32), each token in its tier (uint8).

    DROPPED tokens are left out. ``centre_keys``: the mean of every key channel over the quantised
    tokens travels once, and only differences to it are quantised. When all tokens are NATIVE,
    ``rows`` is kept, not copied.

    ValueError: shapes and types that do not belong together, and tiers that the layout has not.
    KVNotEncodable: a value in a coded tier that is not finite, or too large for float16.
    """
    if rows.dtype not in _COMPUTE_DTYPES.values():
        raise ValueError("rows must be uint16 (BF16) or float32")
    check_span(positions, rows.shape, tiers, layout)
    counts = np.bincount(tiers, minlength=DROPPED + 1)
    if counts[TIER_NATIVE] == len(tiers):
        return native_packet(session, epoch, layer, positions, rows)
    chosen = {tier: np.flatnonzero(tiers == tier) for tier in Tier if counts[tier]}
    payload: dict[int, NDArray[Any]] = {}
    scales: dict[int, NDArray[Any]] = {}
    centre = np.empty(0, np.float16)
    try:
        if centre_keys and any(tier in _SCALED for tier in chosen):
            quantised = np.sort(np.concatenate([chosen[t] for t in chosen if t in _SCALED]))
            centre = _native.kv_centre(rows, quantised, layout.centred_width)
        for tier, numbers in chosen.items():
            if tier == Tier.NATIVE:
                payload[int(tier)] = rows[numbers]
                continue
            parts = coded_parts(layout, tier)
            payload[int(tier)], tier_scales = _native.kv_encode(rows, numbers, parts, centre)
            if tier in _SCALED:
                scales[int(tier)] = tier_scales
    except _native.NativeError as error:
        if error.args[0] != "kv-not-encodable":
            raise ValueError(error.args[1]) from error
        raise not_encodable(layer, str(error.args[1])) from error
    kept = tiers != DROPPED
    positions, tiers = positions[kept], tiers[kept]
    return sealed(session, epoch, layer, positions, tiers, payload, scales, centre)


def not_encodable(layer: int, reason: str) -> KVNotEncodable:
    """The error of a value that no coded tier holds."""
    return KVNotEncodable(
        f"the keys and values of layer {layer} cannot be encoded",
        reason,
        "Native precision carries them unchanged",
    )


def check_span(
    positions: NDArray[np.int32],
    rows_shape: tuple[int, ...],
    tiers: NDArray[np.uint8],
    layout: KVLayout,
) -> None:
    """ValueError unless positions, rows, tiers and layout belong together."""
    if positions.dtype != np.int32 or positions.ndim != 1:
        raise ValueError("positions must be int32 [n]")
    if tiers.dtype != np.uint8 or tiers.shape != positions.shape:
        raise ValueError("tiers must be uint8 [n]")
    if rows_shape != (len(positions), layout.width):
        raise ValueError("rows must be [n, width of the layout]")
    if np.any((tiers > max(Tier)) & (tiers != DROPPED)):
        raise ValueError("a tier is unknown")


def sealed(
    session: int,
    epoch: int,
    layer: int,
    positions: NDArray[np.int32],
    tiers: NDArray[np.uint8],
    payload: dict[int, NDArray[Any]],
    scales: dict[int, NDArray[Any]],
    centre: NDArray[np.float16],
) -> KVPacket:
    """A packet of these fields with the checksum that belongs to them."""
    packet = KVPacket(
        VERSION, session, epoch, layer, positions, tiers, payload, scales, centre, checksum=0
    )
    object.__setattr__(packet, "checksum", checksum(packet))
    return packet


def decode_packet(
    packet: KVPacket, layout: KVLayout, compute: str
) -> tuple[NDArray[np.int32], NDArray[Any]]:
    """(positions int32 [m], rows [m, W]) in the compute type: "bf16" (uint16) or "exact" (float32).

    Verifies the packet first: PacketRefused when it is damaged or of another layout or type. Rows
    of a packet that is all NATIVE are the packet's own, not copies.
    """
    verify(packet, layout, compute)
    return _decode(packet, layout, compute)


def decode_parts(
    packet: KVPacket, layout: KVLayout, compute: str
) -> Iterator[tuple[NDArray[np.int32], NDArray[Any]]]:
    """``decode_packet`` of at most PART_TOKENS tokens after the other, the whole verified first."""
    verify(packet, layout, compute)
    for begin in range(0, len(packet.positions), PART_TOKENS):
        yield _decode(_part(packet, begin, begin + PART_TOKENS), layout, compute)


def _part(packet: KVPacket, begin: int, end: int) -> KVPacket:
    """Tokens [begin, end) as views; the checksum is that of the whole."""
    tiers = packet.tiers[begin:end]
    payload: dict[int, NDArray[Any]] = {}
    scales: dict[int, NDArray[Any]] = {}
    for code in packet.payload:
        first = np.count_nonzero(packet.tiers[:begin] == code)
        rows = slice(first, first + np.count_nonzero(tiers == code))
        if rows.start == rows.stop:
            continue
        payload[code] = packet.payload[code][rows]
        if code in packet.scales:
            scales[code] = packet.scales[code][rows]
    positions = packet.positions[begin:end]
    return replace(packet, positions=positions, tiers=tiers, payload=payload, scales=scales)


def _decode(
    packet: KVPacket, layout: KVLayout, compute: str
) -> tuple[NDArray[np.int32], NDArray[Any]]:
    if list(packet.payload) == [TIER_NATIVE]:
        return packet.positions, packet.payload[TIER_NATIVE]
    rows = np.empty((len(packet.positions), layout.width), _COMPUTE_DTYPES[compute])
    for code, payload in packet.payload.items():
        numbers = np.flatnonzero(packet.tiers == code)
        if code == TIER_NATIVE:
            rows[numbers] = payload
            continue
        scales = packet.scales.get(code)
        if scales is None:
            scales = np.empty((len(numbers), 0), np.float16)
        parts = coded_parts(layout, Tier(code))
        try:
            _native.kv_decode(payload, scales, parts, packet.centre, rows, numbers)
        except _native.NativeError as error:
            raise _refused(packet, str(error.args[1])) from error
    return packet.positions, rows


def checksum(packet: KVPacket) -> int:
    """CRC-32 of every field but the checksum itself, types and shapes of arrays included."""
    header = (packet.version, packet.session, packet.epoch, packet.layer)
    crc = zlib.crc32(repr(tuple(map(int, header))).encode())
    named: list[tuple[str, NDArray[Any]]]
    named = [("positions", packet.positions), ("tiers", packet.tiers), ("centre", packet.centre)]
    named += [(f"payload {tier}", packet.payload[tier]) for tier in sorted(packet.payload)]
    named += [(f"scales {tier}", packet.scales[tier]) for tier in sorted(packet.scales)]
    for name, array in named:
        crc = zlib.crc32(f"{name} {array.dtype.str} {array.shape}".encode(), crc)
        # zlib takes no view of an array without elements.
        crc = zlib.crc32(np.ascontiguousarray(array).data, crc) if array.size else crc
    return crc


def verify(packet: KVPacket, layout: KVLayout | None = None, compute: str | None = None) -> None:
    """Raise PacketRefused unless the packet is whole, of this version and consistent in itself.

    With a layout and a compute type: also unless it belongs to them.
    """
    if packet.version != VERSION:
        raise PacketRefused("a KV packet was refused", f"version {packet.version} is not {VERSION}")
    if reason := _structure_damage(packet):
        raise _refused(packet, reason)
    if checksum(packet) != packet.checksum:
        raise _refused(packet, "its checksum does not match")
    if reason := _content_damage(packet) or _foreign(packet, layout, compute):
        raise _refused(packet, reason)


def _refused(packet: KVPacket, reason: str) -> PacketRefused:
    return PacketRefused(f"a KV packet of layer {packet.layer} was refused", reason)


def _is_array(array: object, dtype: Any, num_dimensions: int) -> bool:
    return isinstance(array, np.ndarray) and array.dtype == dtype and array.ndim == num_dimensions


def _structure_damage(packet: KVPacket) -> str:
    """What keeps the checksum from being computed: fields of a wrong type."""
    numbers = (packet.session, packet.epoch, packet.layer, packet.checksum)
    if not all(isinstance(number, (int, np.integer)) for number in numbers):
        return "a number of its header is none"
    if not _is_array(packet.positions, np.int32, 1):
        return "its positions are not int32 [n]"
    if not _is_array(packet.tiers, np.uint8, 1) or len(packet.tiers) != len(packet.positions):
        return "it has not one tier a token"
    if not _is_array(packet.centre, np.float16, 1):
        return "its centre is not float16 [elements]"
    if not isinstance(packet.payload, dict) or not isinstance(packet.scales, dict):
        return "its tiers are not told apart"
    known = {int(tier) for tier in Tier}
    if not set(packet.payload) <= known or not set(packet.scales) <= known:
        return "it holds an unknown tier"
    for tier, array in packet.payload.items():
        dtypes = list(_COMPUTE_DTYPES.values()) if tier == TIER_NATIVE else [np.uint8]
        if not any(_is_array(array, dtype, 2) for dtype in dtypes):
            return f"the payload of tier {tier} has a wrong type or shape"
    if not all(_is_array(array, np.float16, 2) for array in packet.scales.values()):
        return "its scales are not float16 [tokens, parts]"
    return ""


def _content_damage(packet: KVPacket) -> str:
    """What is wrong although the checksum is right."""
    if len(packet.positions) and (packet.positions[0] < 0 or np.any(np.diff(packet.positions) < 1)):
        return "its positions do not rise"
    numbers = np.bincount(packet.tiers)
    counts = {int(code): int(numbers[code]) for code in np.flatnonzero(numbers)}
    if set(packet.payload) != set(counts):
        return "it lacks a tier or holds an unknown one"
    if set(packet.scales) != set(counts) & {int(tier) for tier in _SCALED}:
        return "it lacks scales or holds some of no tier"
    for arrays in (packet.payload, packet.scales):
        if any(len(array) != counts[tier] for tier, array in arrays.items()):
            return "a tier has not one row a token"
    return ""


def _foreign(packet: KVPacket, layout: KVLayout | None, compute: str | None) -> str:
    """Why the packet does not belong to a layout and a compute type."""
    native = packet.payload.get(TIER_NATIVE)
    if compute is not None and native is not None and native.dtype != _COMPUTE_DTYPES[compute]:
        return "its elements are of another compute type"
    if layout is None:
        return ""
    if len(packet.centre) not in (0, layout.centred_width):
        return "its centre has another width"
    for code, array in packet.payload.items():
        if code == TIER_NATIVE:
            wanted = (layout.width, 0)
        else:
            try:
                wanted = tier_sizes(layout, Tier(code))
            except ValueError as error:
                return str(error)
        scales = packet.scales.get(code)
        if (array.shape[1], 0 if scales is None else scales.shape[1]) != wanted:
            return f"its rows of tier {Tier(code).name} have another width"
    return ""
