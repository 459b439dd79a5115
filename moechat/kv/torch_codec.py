"""KV packets of rows that lie on a torch device, and rows on a device from packets.

The same bytes as kv/packet.py with the native codec (kernels/kv_codec/kv_codec.h has the codes).
It imports torch, which the rest of the product does without: import it where rows are on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found, unused-ignore]
from numpy.typing import NDArray

from moechat.errors import PacketRefused
from moechat.kv.layout import KVLayout
from moechat.kv.packet import KVPacket, check_span, not_encodable, sealed, verify
from moechat.kv.tiers import DROPPED, Tier, tier_sizes
from moechat.kv.torch_rows import RowSum, decode_rows, encode_run, runs_of, summations

# Integers of an element's size carry every bit pattern unchanged, a NaN's too.
_INTEGERS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
_HOST_DTYPES: dict[torch.dtype, type[Any]] = {torch.bfloat16: np.uint16, torch.float32: np.float32}
_COMPUTE_DTYPES = {"bf16": torch.bfloat16, "exact": torch.float32}
_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class _Coded:
    """What a packet is made of, on the device. Payloads and scales as in KVPacket.

    ``findings``: int64 [2 + coded tiers]. Whether the centre's sums surely were taken in order;
    the first channel whose mean, then each tier's first row that cannot be coded, or -1.
    """

    findings: torch.Tensor
    centre: torch.Tensor
    payload: dict[int, torch.Tensor]
    scales: dict[int, torch.Tensor]


def encode_packet(
    session: int,
    epoch: int,
    layer: int,
    positions: NDArray[np.int32],
    rows: torch.Tensor,
    tiers: NDArray[np.uint8],
    layout: KVLayout,
    *,
    centre_keys: bool = False,
) -> KVPacket:
    """kv.packet.encode_packet of ``rows`` [n, W] (bfloat16 or float32) on any device.

    The packet's arrays are slices of one host buffer of its own, pinned if the rows are on CUDA.
    The caller's stream is waited for once, when that buffer has been filled.

    ValueError, KVNotEncodable: as kv.packet.encode_packet.
    """
    if rows.dtype not in _INTEGERS:
        raise ValueError("rows must be bfloat16 or float32")
    check_span(positions, tuple(rows.shape), tiers, layout)
    counts = np.bincount(tiers, minlength=DROPPED + 1)
    chosen = [tier for tier in Tier if counts[tier]]
    scaled = [tier for tier in chosen if tier != Tier.NATIVE and tier_sizes(layout, tier)[1]]
    order = np.argsort(tiers, kind="stable")[: len(tiers) - counts[DROPPED]]
    quantised = np.flatnonzero(np.isin(tiers, scaled)) if centre_keys else order[:0]
    order_bytes, quantised_bytes = _upload([order, quantised], rows.device)
    by_tier = torch.split(order_bytes.view(torch.int64), [int(counts[tier]) for tier in chosen])
    numbers = dict(zip(chosen, by_tier))

    for sum_rows in summations(rows.device):
        coded = _encode(rows, numbers, quantised_bytes.view(torch.int64), layout, sum_rows)
        tensors = [coded.findings, coded.centre, *coded.payload.values(), *coded.scales.values()]
        flat = iter(_download(tensors))
        in_order, bad_channel, *bad_rows = next(flat).view(np.int64).tolist()
        if in_order:
            break
    if bad_channel >= 0:
        reason = f"channel {bad_channel} has a mean that is not finite or too large"
        raise not_encodable(layer, reason)
    for row in bad_rows:
        if row >= 0:
            reason = f"row {row} holds a value that is not finite or too large"
            raise not_encodable(layer, reason)

    centre = next(flat).view(np.float16)
    payload: dict[int, NDArray[Any]] = {}
    for code, tensor in coded.payload.items():
        dtype = _HOST_DTYPES[rows.dtype] if code == Tier.NATIVE else np.uint8
        payload[code] = next(flat).view(dtype).reshape(tuple(tensor.shape))
    scales: dict[int, NDArray[Any]] = {}
    for code, tensor in coded.scales.items():
        scales[code] = next(flat).view(np.float16).reshape(tuple(tensor.shape))
    kept = tiers != DROPPED
    return sealed(session, epoch, layer, positions[kept], tiers[kept], payload, scales, centre)


def decode_packet(
    packet: KVPacket, layout: KVLayout, compute: str, device: torch.device | str
) -> tuple[NDArray[np.int32], torch.Tensor]:
    """(positions int32 [m] in host memory, rows [m, W] on ``device``) in the compute type.

    "bf16" (bfloat16) or "exact" (float32). Verifies the packet first; PacketRefused as
    kv.packet.decode_packet. The rows are the caller's own. Of a packet with coded tiers the
    device is waited for: it is what finds values that are not finite.
    """
    verify(packet, layout, compute)
    device = torch.device(device)
    if packet.payload.keys() - {int(Tier.NATIVE)} and not np.isfinite(packet.centre).all():
        raise _refused(packet, "the centre must be finite")
    order = np.argsort(packet.tiers, kind="stable")
    counts = np.bincount(packet.tiers, minlength=max(Tier) + 1)
    arrays: list[NDArray[Any]]
    arrays = [order, packet.centre, *packet.payload.values(), *packet.scales.values()]
    flat = iter(_upload(arrays, device))
    chosen = sorted(packet.payload)
    by_tier = torch.split(next(flat).view(torch.int64), [int(counts[code]) for code in chosen])
    numbers = dict(zip(chosen, by_tier))
    centre = next(flat).view(torch.float16).float()
    payload = {code: next(flat).reshape(int(counts[code]), -1) for code in packet.payload}
    scales = {
        code: next(flat).view(torch.float16).reshape(array.shape)
        for code, array in packet.scales.items()
    }

    dtype = _COMPUTE_DTYPES[compute]
    rows = torch.empty((len(order), layout.width), dtype=dtype, device=device)
    finite = []
    for code, tier_payload in payload.items():
        if code == Tier.NATIVE:
            integers = _INTEGERS[dtype]
            rows.view(integers).index_copy_(0, numbers[code], tier_payload.view(integers))
            continue
        runs = runs_of(layout, Tier(code), len(centre))
        tier_rows = decode_rows(tier_payload, scales.get(code), runs, centre)
        finite.append(torch.isfinite(tier_rows).all())
        rows.index_copy_(0, numbers[code], tier_rows.to(dtype))
    if finite and not bool(torch.stack(finite).all()):
        raise _refused(packet, "a scale or a float16 value is not finite")
    return packet.positions, rows


def _refused(packet: KVPacket, reason: str) -> PacketRefused:
    return PacketRefused(f"a KV packet of layer {packet.layer} was refused", reason)


def _encode(
    rows: torch.Tensor,
    numbers: dict[Tier, torch.Tensor],
    quantised: torch.Tensor,
    layout: KVLayout,
    sum_rows: RowSum,
) -> _Coded:
    """``numbers`` (int64) of each tier's rows; the centre is of ``quantised`` rows, if any."""
    payload: dict[int, torch.Tensor] = {}
    scales: dict[int, torch.Tensor] = {}
    findings = [quantised.new_ones(()), quantised.new_full((), -1)]
    centre = rows.new_empty(0, dtype=torch.float16)
    if len(quantised):
        keys = rows[:, : layout.centred_width].index_select(0, quantised).float()
        sums, in_order = sum_rows(keys)
        centre = (sums / sums.new_full((), len(quantised))).to(torch.float16)
        channels = torch.arange(len(centre), device=rows.device)
        findings = [in_order.long(), _first(~torch.isfinite(centre), channels)]
    wide_centre = centre.float()
    for tier, tier_numbers in numbers.items():
        if tier == Tier.NATIVE:
            integers = rows.view(_INTEGERS[rows.dtype])
            payload[int(tier)] = integers.index_select(0, tier_numbers)
            continue
        tier_rows = rows.index_select(0, tier_numbers).float()
        runs = [
            encode_run(tier_rows, run, wide_centre) for run in runs_of(layout, tier, len(centre))
        ]
        payload[int(tier)] = torch.cat([run_payload for run_payload, _, _ in runs], 1)
        if tier_scales := [run_scales for _, run_scales, _ in runs if run_scales is not None]:
            scales[int(tier)] = torch.cat(tier_scales, 1)
        bad = torch.stack([run_bad for _, _, run_bad in runs]).any(0)
        findings.append(_first(bad, tier_numbers))
    return _Coded(torch.stack(findings), centre, payload, scales)


def _first(bad: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The number (they rise) of the first that is bad, or -1: int64 []."""
    first = numbers.take(bad.long().argmax())  # an index of a tensor would wait for the device
    return torch.where(bad.any(), first, numbers.new_full((), -1))


def _places(sizes_bytes: Sequence[int]) -> tuple[list[slice], int]:
    """Aligned slices of one buffer, and its size."""
    slices, end = [], 0
    for size in sizes_bytes:
        slices.append(slice(end, end + size))
        end += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return slices, end


def _upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """The bytes of each array on ``device``, in one copy that is not waited for on CUDA."""
    slices, size_bytes = _places([array.nbytes for array in arrays])
    on_cuda = device.type == "cuda"
    host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=on_cuda)
    for place, array in zip(slices, arrays):
        host.numpy()[place] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = host.to(device, non_blocking=on_cuda)
    return [there[place] for place in slices]


def _download(tensors: Sequence[torch.Tensor]) -> list[NDArray[np.uint8]]:
    """The bytes of each tensor in host memory of their own, in one copy."""
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    slices, size_bytes = _places([len(part) for part in flat])
    there = torch.empty(size_bytes, dtype=torch.uint8, device=tensors[0].device)
    for place, part in zip(slices, flat):
        there[place] = part
    if there.device.type == "cuda":
        host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        host.copy_(there, non_blocking=True)
        torch.cuda.current_stream(there.device).synchronize()
    else:
        host = there.cpu()
    return [host.numpy()[place] for place in slices]
