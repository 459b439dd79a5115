"""Packets of mixed tiers: round trips, bytes, and every kind of damage refused."""

from __future__ import annotations

import copy
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_layouts import GROUPED, LATENT, grouped, spans

from moechat import _native
from moechat.errors import KVNotEncodable, PacketRefused
from moechat.kv import packet as packet_module
from moechat.kv.layout import KVLayout
from moechat.kv.packet import (
    KVPacket,
    checksum,
    decode_packet,
    decode_parts,
    encode_packet,
    verify,
)
from moechat.kv.tiers import DROPPED, Tier, bytes_per_token, coded_parts

COMPUTES = {"bf16": np.uint16, "exact": np.float32}


def floats(rows: np.ndarray) -> np.ndarray:
    return (rows.astype(np.uint32) << 16).view(np.float32) if rows.dtype == np.uint16 else rows


def make_rows(num_rows: int, layout: KVLayout, compute: str, seed: int = 1) -> np.ndarray:
    """Keys and values with a constant offset a channel, of all sizes."""
    random = np.random.default_rng(seed)
    shape = (num_rows, layout.width)
    rows = random.standard_normal(shape) + 8 * random.standard_normal(layout.width)
    rows = (rows * 10.0 ** random.uniform(-6, 2, (num_rows, 1))).astype(np.float32)
    return rows if compute == "exact" else _native.to_bf16(rows.ravel()).reshape(shape)


def make_packet(layout: KVLayout = GROUPED, compute: str = "bf16", centre: bool = True) -> KVPacket:
    """Every tier that the layout has, in turns."""
    own = [tier for tier in Tier if tier != Tier.K8V4 or layout is GROUPED]
    tiers = np.array(own * 3, np.uint8)
    positions = np.arange(5, 5 + len(tiers), dtype=np.int32)
    rows = make_rows(len(tiers), layout, compute)
    return encode_packet(1, 2, 3, positions, rows, tiers, layout, centre_keys=centre)


@settings(deadline=None)
@given(spans())
def test_round_trip(span: tuple[KVLayout, str, np.ndarray, int, bool]) -> None:
    layout, compute, tiers, seed, centre_keys = span
    rows = make_rows(len(tiers), layout, compute, seed)
    positions = np.arange(len(tiers), dtype=np.int32) * 3 + 7
    packet = encode_packet(0, 0, 0, positions, rows, tiers, layout, centre_keys=centre_keys)
    kept = tiers != DROPPED
    element_bytes = rows.itemsize
    quantised = np.isin(tiers, (Tier.INT8, Tier.K8V4, Tier.INT4)).any()
    wanted = sum(bytes_per_token(layout, Tier(t), element_bytes) for t in tiers[kept])
    wanted += 2 * layout.centred_width * bool(centre_keys and quantised)
    assert packet.num_bytes == wanted
    assert packet.header_bytes == 5 * kept.sum()

    got_positions, got = decode_packet(packet, layout, compute)
    assert got_positions.tolist() == positions[kept].tolist()
    assert got.dtype == COMPUTES[compute] and got.shape == (kept.sum(), layout.width)
    native = tiers[kept] == Tier.NATIVE
    assert got[native].tobytes() == rows[kept][native].tobytes()
    for tier in (Tier.FP16, Tier.INT8, Tier.K8V4, Tier.INT4):
        chosen = np.flatnonzero(tiers[kept] == tier)
        if not len(chosen):
            continue
        values, decoded = floats(rows[kept][chosen]), floats(got[chosen])
        scales = iter(packet.scales.get(int(tier), np.empty((0, 0))).T.astype(np.float32))
        for begin, width, code in coded_parts(layout, tier):
            part = values[:, begin : begin + width]
            error = np.abs(part - decoded[:, begin : begin + width])
            if code == "f16":
                step = np.spacing(np.abs(part).astype(np.float16)).astype(np.float32)
            else:
                step = np.abs(next(scales))[:, None]
            # Half a step, and what rounds on the way: float32 sums, and BF16 at the end.
            centre = np.zeros(width, np.float32)
            if len(packet.centre) >= begin + width:
                centre += packet.centre[begin : begin + width].astype(np.float32)
            size = np.abs(part) + step + np.abs(centre)
            rounding = size * (2.0**-8 if compute == "bf16" else 2.0**-20)
            # INT4 has no code for what lies opposite to the largest, beyond 7.5 steps.
            cut = code == "int4" and np.abs(part - centre) > 7.4 * step
            assert np.all(error <= np.where(cut, step, step / 2) + rounding)


@pytest.mark.parametrize("layout", [GROUPED, LATENT], ids=["grouped", "latent"])
def test_centring_takes_a_constant_offset_away(layout: KVLayout) -> None:
    random = np.random.default_rng(3)
    rows = random.standard_normal((200, layout.width)).astype(np.float32)
    rows[:, : layout.centred_width] += 50 * random.standard_normal(layout.centred_width)
    tiers, positions = np.full(200, Tier.INT4, np.uint8), np.arange(200, dtype=np.int32)
    errors = []
    for centre in (False, True):
        packet = encode_packet(0, 0, 0, positions, rows, tiers, layout, centre_keys=centre)
        back = decode_packet(packet, layout, "exact")[1]
        errors.append(np.abs(back - rows)[:, : layout.centred_width].mean())
    assert errors[1] < errors[0] / 5


def test_the_centre_is_of_quantised_tokens_only() -> None:
    rows = make_rows(4, GROUPED, "exact")
    rows[0] = rows[3] = 1e4
    tiers = np.array([Tier.FP16, Tier.INT8, Tier.INT4, DROPPED], np.uint8)
    packet = encode_packet(
        0, 0, 0, np.arange(4, dtype=np.int32), rows, tiers, GROUPED, centre_keys=True
    )
    wanted = rows[1:3, :32].mean(0).astype(np.float16).astype(np.float32)
    np.testing.assert_allclose(packet.centre.astype(np.float32), wanted, rtol=2e-3)


def test_a_packet_owns_its_bytes() -> None:
    rows = make_rows(4, GROUPED, "bf16")
    tiers = np.array([0, 0, 1, 2], np.uint8)
    positions = np.arange(4, dtype=np.int32)
    packet = encode_packet(0, 0, 0, positions, rows, tiers, GROUPED)
    rows[:] = 0
    tiers[:] = 0
    verify(packet)


@pytest.mark.parametrize("compute", ["bf16", "exact"])
@pytest.mark.parametrize("tier", [Tier.FP16, Tier.INT8, Tier.K8V4, Tier.INT4])
@pytest.mark.parametrize("centre", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e38])
def test_what_cannot_be_encoded_is_named(tier, compute, centre, bad) -> None:
    rows = make_rows(3, GROUPED, "exact")
    rows[1, 40] = rows[1, 4] = bad
    if compute == "bf16":
        rows = _native.to_bf16(rows.ravel()).reshape(rows.shape)
    tiers, positions = np.full(3, tier, np.uint8), np.arange(3, dtype=np.int32)
    with pytest.raises(KVNotEncodable, match="layer 9"):
        encode_packet(0, 0, 9, positions, rows, tiers, GROUPED, centre_keys=centre)
    tiers[1] = Tier.NATIVE  # carries it unchanged
    packet = encode_packet(0, 0, 9, positions, rows, tiers, GROUPED, centre_keys=centre)
    assert decode_packet(packet, GROUPED, compute)[1][1].tobytes() == rows[1].tobytes()


def test_arguments_that_do_not_belong_together() -> None:
    positions, rows = np.arange(3, dtype=np.int32), make_rows(3, GROUPED, "bf16")
    tiers = np.full(3, Tier.INT8, np.uint8)
    good = (positions, rows, tiers, GROUPED)
    encode_packet(0, 0, 0, *good)
    for place, bad in [
        (0, positions.astype(np.int64)),
        (0, positions[:2]),
        (0, positions[None]),
        (1, rows[:2]),
        (1, rows[:, :63]),
        (1, rows.view(np.int16)),
        (1, rows.astype(np.float64)),
        (2, tiers[:2]),
        (2, tiers.astype(np.int32)),
        (2, np.array([2, 5, 2], np.uint8)),
        (2, np.array([2, 254, 2], np.uint8)),
        (3, LATENT),
    ]:
        arguments = list(good)
        arguments[place] = bad
        with pytest.raises(ValueError):
            encode_packet(0, 0, 0, *arguments)
    with pytest.raises(ValueError, match="K8V4"):
        encode_packet(0, 0, 0, positions, rows[:, :40], np.full(3, Tier.K8V4, np.uint8), LATENT)


def damaged(packet: KVPacket, field: str, value: object, *, sealed: bool) -> KVPacket:
    """A copy with another field; ``sealed``: with the checksum that belongs to it."""
    other = copy.copy(packet)
    object.__setattr__(other, field, value)
    if sealed:
        object.__setattr__(other, "checksum", checksum(other))
    return other


@pytest.mark.parametrize("compute", ["bf16", "exact"])
@pytest.mark.parametrize("layout", [GROUPED, LATENT], ids=["grouped", "latent"])
def test_every_byte_is_inside_the_checksum(layout: KVLayout, compute: str) -> None:
    packet = make_packet(layout, compute)
    verify(packet, layout, compute)
    for field in fields(KVPacket):
        value = getattr(packet, field.name)
        if isinstance(value, int):
            for other in (value + 1, value ^ 2**31, -1 - value, 2**70, None, "1", 1.5):
                with pytest.raises(PacketRefused):
                    verify(damaged(packet, field.name, other, sealed=False))
            continue
        for key in value if isinstance(value, dict) else [None]:
            array = value if key is None else value[key]
            assert array.size
            for byte in range(array.nbytes):
                flipped = array.copy()
                flipped.reshape(-1).view(np.uint8)[byte] ^= 1 << byte % 8
                other = flipped if key is None else {**value, key: flipped}
                with pytest.raises(PacketRefused):
                    verify(damaged(packet, field.name, other, sealed=False))


def broken_arrays(array: np.ndarray) -> list[object]:
    """The same bytes under another type or shape, and fewer or more of them."""
    return [
        array[:-1],
        np.concatenate([array, array[-1:]]),
        array[:0],
        array.astype(">" + array.dtype.str[1:]) if array.itemsize > 1 else array.view(np.int8),
        array.astype(np.float64),
        array.reshape(1, *array.shape),
        array.reshape(-1) if array.ndim > 1 else array.reshape(-1, 1),
        array.tolist(),
        None,
    ]


@pytest.mark.parametrize("sealed", [False, True])
def test_structure_is_checked_even_under_a_right_checksum(sealed: bool) -> None:
    packet = make_packet()
    bad: list[tuple[str, object]] = [("version", 1), ("version", "2")]
    for field in ("positions", "tiers"):
        bad += [(field, other) for other in broken_arrays(getattr(packet, field))]
    bad += [("centre", other) for other in broken_arrays(packet.centre) if other is not None]
    bad = [
        (f, o) for f, o in bad if not (f == "centre" and isinstance(o, np.ndarray) and not o.size)
    ]
    for field in ("payload", "scales"):
        arrays = getattr(packet, field)
        for tier, array in arrays.items():
            bad += [(field, {**arrays, tier: other}) for other in broken_arrays(array)]
            bad.append((field, {t: a for t, a in arrays.items() if t != tier}))
            bad.append((field, {**arrays, tier: array[:, :-1].copy()}))
            bad.append((field, {**arrays, tier: np.concatenate([array, array[:, :1]], 1)}))
            bad += [(field, {**arrays, other: array}) for other in (5, 255, -1, "0")]
        bad += [(field, {}), (field, None), (field, list(arrays.values()))]
    scales = packet.scales[int(Tier.INT8)]
    bad += [("scales", {**packet.scales, tier: scales}) for tier in (0, 1)]
    positions = packet.positions
    bad += [("positions", positions[::-1].copy()), ("positions", positions * 0)]
    bad += [("positions", positions - 6)]
    for code in (0, 1, 4, 5, DROPPED):
        bad.append(("tiers", np.where(packet.tiers == 2, code, packet.tiers).astype(np.uint8)))
    for field, value in bad:
        try:
            other = damaged(packet, field, value, sealed=sealed)
        except (TypeError, ValueError, AttributeError):
            continue  # has no checksum at all
        with pytest.raises(PacketRefused):
            decode_packet(other, GROUPED, "bf16")


@pytest.mark.parametrize("value", [0x7C00, 0xFC00, 0x7E01])
def test_what_is_not_finite_is_refused(value: int) -> None:
    packet = make_packet()
    for field, key in (("scales", 2), ("scales", 4), ("centre", None), ("payload", 1)):
        arrays = getattr(packet, field)
        array = (arrays if key is None else arrays[key]).copy()
        array.reshape(-1).view(np.uint16)[-1] = value
        other = array if key is None else {**arrays, key: array}
        with pytest.raises(PacketRefused, match="finite"):
            decode_packet(damaged(packet, field, other, sealed=True), GROUPED, "bf16")


def test_a_packet_of_another_model_or_compute_type() -> None:
    packet = make_packet()
    for layout, compute in [
        (LATENT, "bf16"), (grouped(2, 17), "bf16"), (grouped(4, 8), "bf16"), (GROUPED, "exact"),
    ]:  # fmt: skip
        with pytest.raises(PacketRefused):
            decode_packet(packet, layout, compute)


@settings(deadline=None)
@given(spans(), st.sampled_from([1, 2, 5, 64]))
def test_parts_are_the_whole(span, part_tokens):
    layout, compute, tiers, seed, centre_keys = span
    rows = make_rows(len(tiers), layout, compute, seed)
    positions = np.arange(len(tiers), dtype=np.int32)
    packet = encode_packet(0, 0, 0, positions, rows, tiers, layout, centre_keys=centre_keys)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packet_module, "PART_TOKENS", part_tokens)
        parts = list(decode_parts(packet, layout, compute))
    whole_positions, whole_rows = decode_packet(packet, layout, compute)
    assert all(len(part) <= part_tokens for part, _ in parts)
    assert [p for part, _ in parts for p in part] == whole_positions.tolist()
    assert b"".join(part.tobytes() for _, part in parts) == whole_rows.tobytes()
