"""Whether lossy KV pays: rates of the stages between prefill and decode, and what follows."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from moechat.kv.packet import decode_packet, encode_packet
from moechat.kv.policy import KVPolicy

_TOKENS = 256  # of the packet that is timed
_ROUNDS = 3


@dataclass(frozen=True)
class StageRates:
    """Bytes a second of each stage, all in bytes of native KV (2 an element)."""

    prefill: float  # KV that prefill makes
    encode: float
    decode: float


def pays(
    rates: StageRates,
    link_bytes_per_second: float | None,
    bytes_sent: float,
    native_bytes_sent: float = 1.0,
) -> bool:
    """Whether the way from prefill to decode is faster with a lossy policy (design 3.10).

    ``bytes_sent``: of each native byte (2 an element), those that cross; ``native_bytes_sent``:
    with native KV, 2.0 in exact mode. ``link_bytes_per_second`` None: shared memory, where nothing
    crosses. The stages overlap, so that the slowest one counts; only encoding is done by the
    prefill thread itself, and adds to its time.
    """
    if link_bytes_per_second is None:
        return False
    native = min(rates.prefill, link_bytes_per_second / native_bytes_sent)
    encoded = 1 / (1 / rates.prefill + 1 / rates.encode)
    return min(encoded, link_bytes_per_second / bytes_sent, rates.decode) > native


def measure_codec(policy: KVPolicy, compute: str) -> tuple[float, float]:
    """Encode and decode rates in bytes of native KV a second: the best of a few rounds."""
    layout = policy.layout
    rows = np.random.default_rng(0).standard_normal((_TOKENS, layout.width), np.float32)
    if compute != "exact":
        rows = (rows.view(np.uint32) >> 16).astype(np.uint16)
    positions = np.arange(_TOKENS, dtype=np.int32)
    tiers = policy.tiers(0, 0, _TOKENS, np.ones(_TOKENS, np.float32))
    num_bytes = 2 * rows.size
    encode_seconds = decode_seconds = float("inf")
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        packet = encode_packet(
            0, 0, 0, positions, rows, tiers, layout, centre_keys=policy.centre_keys
        )
        encoded = time.perf_counter()
        decode_packet(packet, layout, compute)
        encode_seconds = min(encode_seconds, encoded - started)
        decode_seconds = min(decode_seconds, time.perf_counter() - encoded)
    return num_bytes / encode_seconds, num_bytes / decode_seconds
