"""KV packets: one layer's slots of one span of tokens, on their way from prefill to decode.

A packet owns its bytes and never points into a cache. Every token has a tier code; the bytes of a
tier's tokens stand together in ``payload[tier]``, in token order, its scales in ``scales[tier]``.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moechat.errors import PacketRefused

VERSION = 1
TIER_NATIVE = 0  # the compute type, bit for bit: uint16 (BF16) or float32, no scales


@dataclass(frozen=True)
class KVPacket:
    """One layer of one span. Shapes: n tokens, W elements a slot.

    ``epoch`` is raised by cancel and rewind: a packet of an older epoch is stale. ``tiers`` holds a
    code a token (uint8 [n]); ``payload[tier]`` is [tokens of the tier, W] for TIER_NATIVE.
    """

    version: int
    session: int
    epoch: int
    layer: int
    positions: NDArray[np.int32]
    tiers: NDArray[np.uint8]
    payload: dict[int, NDArray[Any]]
    scales: dict[int, NDArray[Any]]
    checksum: int


def native_packet(
    session: int, epoch: int, layer: int, positions: NDArray[np.int32], rows: NDArray[Any]
) -> KVPacket:
    """A packet whose tokens all are TIER_NATIVE. ``rows`` [n, W] is kept, not copied."""
    packet = KVPacket(
        version=VERSION,
        session=session,
        epoch=epoch,
        layer=layer,
        positions=positions,
        tiers=np.full(len(positions), TIER_NATIVE, np.uint8),
        payload={TIER_NATIVE: rows},
        scales={},
        checksum=0,
    )
    object.__setattr__(packet, "checksum", checksum(packet))
    return packet


def checksum(packet: KVPacket) -> int:
    """CRC-32 of every field but the checksum itself."""
    header = (packet.version, packet.session, packet.epoch, packet.layer)
    crc = zlib.crc32(np.array(header, np.int64).tobytes())
    for array in (packet.positions, packet.tiers):
        crc = zlib.crc32(np.ascontiguousarray(array).data, crc)
    for part in (packet.payload, packet.scales):
        for tier in sorted(part):
            crc = zlib.crc32(np.ascontiguousarray(part[tier]).data, zlib.crc32(bytes([tier]), crc))
    return crc


def verify(packet: KVPacket) -> None:
    """Raise PacketRefused unless the packet is whole, of this version and of known tiers."""
    if packet.version != VERSION:
        raise PacketRefused("a KV packet was refused", f"version {packet.version} is not {VERSION}")
    if checksum(packet) != packet.checksum:
        raise PacketRefused(
            f"a KV packet of layer {packet.layer} was refused", "its checksum does not match"
        )
    reason = ""
    if packet.positions.dtype != np.int32 or np.any(np.diff(packet.positions) <= 0):
        reason = "its positions do not rise"
    elif len(packet.tiers) != len(packet.positions):
        reason = "it has not one tier a token"
    elif TIER_NATIVE not in packet.payload or np.any(packet.tiers != TIER_NATIVE):
        reason = "it lacks its tier or holds an unknown one"
    if reason:
        raise PacketRefused(f"a KV packet of layer {packet.layer} was refused", reason)
