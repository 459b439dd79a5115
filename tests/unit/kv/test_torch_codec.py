"""The torch codec against the native one, byte for byte, on torch's CPU device and CUDA if any."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from kv_layouts import GROUPED, LATENT, grouped, latent, spans

from moechat.errors import KVNotEncodable, PacketRefused
from moechat.kv import packet as native
from moechat.kv.layout import KVLayout, Part
from moechat.kv.packet import KVPacket, checksum, verify
from moechat.kv.tiers import DROPPED, Tier

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")
from moechat.kv import torch_codec, torch_rows  # noqa: E402

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
BITS = {"bf16": np.uint16, "exact": np.uint32}
OWN = {"bf16": np.uint16, "exact": np.float32}


def to_torch(rows: np.ndarray) -> torch.Tensor:
    if rows.dtype == np.uint16:
        return torch.from_numpy(rows.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(rows.copy())


def bits_of(rows: torch.Tensor) -> bytes:
    return rows.contiguous().view(torch.uint8).numpy().tobytes()


def finite_bits(random: np.random.Generator, shape: tuple[int, ...], compute: str) -> np.ndarray:
    """Rows each of few exponents next to each other, subnormals and zeros of both signs included,
    below 2^14; some rows all zero, some of few distinct values, so that magnitudes tie."""
    fraction_bits = 7 if compute == "bf16" else 23
    exponents = random.integers(0, 142, (shape[0], 1)) - random.integers(0, 10, shape)
    exponents = np.where(random.random((shape[0], 1)) < 0.2, exponents // 64, exponents)
    bits = exponents.clip(0).astype(np.uint32) << fraction_bits
    bits |= random.integers(0, 1 << fraction_bits, shape, np.uint32)
    bits[random.random(shape) < 0.1] = 0
    coarse = random.random(shape[0]) < 0.3
    bits[coarse] &= np.uint32(0xFE << fraction_bits | 1 << fraction_bits - 1)
    bits[random.random(shape[0]) < 0.1] = 0
    bits |= random.integers(0, 2, shape, np.uint32) << np.uint32(8 + fraction_bits)
    return bits.astype(BITS[compute]).view(OWN[compute])


def encode_both(
    *span: object, devices: Sequence[str] = DEVICES, centre_keys: bool = False
) -> KVPacket:
    """The native packet, after the others were seen to be the same, or to be refused the same."""
    positions, rows, *rest = span
    for device in devices:
        given_rows = to_torch(rows).to(device)
        try:
            wanted = native.encode_packet(4, 5, 6, positions, rows, *rest, centre_keys=centre_keys)
        except (ValueError, KVNotEncodable) as error:
            with pytest.raises(type(error)) as caught:
                torch_codec.encode_packet(
                    4, 5, 6, positions, given_rows, *rest, centre_keys=centre_keys
                )
            assert str(caught.value) == str(error)
            raise
        got = torch_codec.encode_packet(
            4, 5, 6, positions, given_rows, *rest, centre_keys=centre_keys
        )
        same_packets(got, wanted)
    return wanted


def same_packets(got: KVPacket, wanted: KVPacket) -> None:
    for field in fields(KVPacket):
        mine, own = getattr(got, field.name), getattr(wanted, field.name)
        if not isinstance(own, dict):
            mine, own = {0: mine}, {0: own}
        assert list(mine) == list(own)
        for key in own:
            if isinstance(own[key], np.ndarray):
                assert mine[key].dtype == own[key].dtype and mine[key].shape == own[key].shape
                assert mine[key].tobytes() == own[key].tobytes(), (field.name, key)
            else:
                assert mine[key] == own[key]


def decode_both(packet: KVPacket, layout: KVLayout, compute: str) -> None:
    wanted_positions, wanted = native.decode_packet(packet, layout, compute)
    for device in DEVICES:
        positions, rows = torch_codec.decode_packet(packet, layout, compute, device)
        assert positions.tolist() == wanted_positions.tolist()
        assert rows.dtype == {"bf16": torch.bfloat16, "exact": torch.float32}[compute]
        assert rows.device.type == device and tuple(rows.shape) == wanted.shape
        assert bits_of(rows.cpu()) == wanted.tobytes()


@settings(deadline=None)
@given(spans())
def test_same_packets_and_same_rows(span: tuple[KVLayout, str, np.ndarray, int, bool]) -> None:
    layout, compute, tiers, seed, centre_keys = span
    random = np.random.default_rng(seed)
    rows = finite_bits(random, (len(tiers), layout.width), compute)
    anything = np.isin(tiers, (Tier.NATIVE, DROPPED))  # NaNs keep their bits, or do not cross
    rows[anything] = (
        random.integers(0, 2**32, rows[anything].shape).astype(BITS[compute]).view(rows.dtype)
    )
    positions = np.arange(len(tiers), dtype=np.int32) * 3 + 7
    packet = encode_both(positions, rows, tiers, layout, centre_keys=centre_keys)
    decode_both(packet, layout, compute)


@pytest.mark.parametrize("compute", ["bf16", "exact"])
@pytest.mark.parametrize("tier", [Tier.FP16, Tier.INT8, Tier.K8V4, Tier.INT4])
def test_many_rows_of_few_elements(tier: Tier, compute: str) -> None:
    """Whatever a scale or a float16 may round to: 60,000 scales of each code."""
    layout = grouped(1, 3)
    rows = finite_bits(np.random.default_rng(tier), (60_000, layout.width), compute)
    positions, tiers = np.arange(len(rows), dtype=np.int32), np.full(len(rows), tier, np.uint8)
    decode_both(encode_both(positions, rows, tiers, layout), layout, compute)


def test_every_float16_and_every_tie_between_two() -> None:
    values = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    between = (values[1:] + values[:-1]) / 2  # exact
    neighbours = [np.nextafter(between, np.float32(end)) for end in (0, np.inf)]
    row = np.concatenate([values, between, *neighbours])
    rows = np.stack([row, -row])
    layout = latent(row.size - 1, 1)
    packet = encode_both(
        np.arange(2, dtype=np.int32), rows, np.full(2, Tier.FP16, np.uint8), layout
    )
    decode_both(packet, layout, "exact")


@pytest.mark.parametrize(("tier", "steps"), [(Tier.INT8, 127), (Tier.INT4, 8)])
def test_scales_that_are_a_float16_and_their_neighbours(tier: Tier, steps: int) -> None:
    halves = np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    exact = halves * np.float32(steps)  # no rounding: 11 bits times 7
    above = np.nextafter(exact[:-1], np.float32(np.inf))
    tiny = np.arange(1, 200, dtype=np.uint32).view(np.float32)  # / steps may be 0 in float32
    rows = np.concatenate([exact, above, np.nextafter(exact, np.float32(0)), tiny])[:, None]
    rows = rows * np.array([1, -0.5], np.float32)
    positions, tiers = np.arange(len(rows), dtype=np.int32), np.full(len(rows), tier, np.uint8)
    layout = KVLayout((Part(0, 2, "key"),))
    decode_both(encode_both(positions, rows, tiers, layout), layout, "exact")


@pytest.mark.parametrize("compute", ["bf16", "exact"])
@pytest.mark.parametrize("tier", [Tier.FP16, Tier.INT8, Tier.K8V4, Tier.INT4])
@pytest.mark.parametrize("centre_keys", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("place", [4, 40])
def test_what_cannot_be_encoded_is_named_alike(tier, compute, centre_keys, bad, place) -> None:
    rows = np.ones((5, GROUPED.width), np.float32)
    rows[2:4, place] = bad
    if compute == "bf16":
        rows = (rows.view(np.uint32) >> 16).astype(np.uint16)
    tiers = np.array([Tier.INT8, Tier.FP16, tier, tier, tier], np.uint8)
    span = (np.arange(5, dtype=np.int32), rows, tiers, GROUPED)
    of_the_centre = centre_keys and place < GROUPED.centred_width and tier != Tier.FP16
    with pytest.raises(KVNotEncodable, match="channel 4" if of_the_centre else "row 2"):
        encode_both(*span, centre_keys=centre_keys)
    tiers[2:4] = Tier.NATIVE  # carries them unchanged
    decode_both(encode_both(*span, centre_keys=centre_keys), GROUPED, compute)


@pytest.mark.parametrize(
    ("tier", "largest"),
    [(Tier.FP16, 65504.0), (Tier.INT8, 65504.0 * 127), (Tier.INT4, 65504.0 * 8)],
)
def test_the_largest_that_can_be_encoded(tier: Tier, largest: float) -> None:
    rows = np.full((1, GROUPED.width), largest, np.float32)
    span = (np.arange(1, dtype=np.int32), rows, np.array([tier], np.uint8), GROUPED)
    decode_both(encode_both(*span), GROUPED, "exact")
    rows[0, 9] = np.nextafter(rows[0, 9], np.float32(np.inf))
    with pytest.raises(KVNotEncodable):
        encode_both(*span)


def centred_span(num_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, KVLayout]:
    """Keys whose mean depends on the order of the sum, one channel all -0."""
    random = np.random.default_rng(8)
    rows = random.standard_normal((num_tokens, GROUPED.width)).astype(np.float32)
    rows *= 10.0 ** random.uniform(-3, 3, rows.shape).astype(np.float32)
    rows[:, 3] = -0.0
    tiers = np.array([Tier.INT4, Tier.FP16, Tier.INT8, DROPPED], np.uint8)[
        np.arange(num_tokens) % 4
    ]
    return np.arange(num_tokens, dtype=np.int32), rows, tiers, GROUPED


@pytest.mark.parametrize("ways", [["_sum_one_by_one"], ["_sum_by_scan", "_sum_one_by_one"]])
def test_the_centre_is_summed_in_the_order_of_the_rows(monkeypatch, ways: list[str]) -> None:
    taken = []

    def counted(name: str) -> torch_rows.RowSum:
        return lambda rows: taken.append(name) or getattr(torch_rows, name)(rows)

    monkeypatch.setattr(torch_codec, "summations", lambda device: [counted(w) for w in ways])
    packet = encode_both(*centred_span(1000), devices=["cpu"], centre_keys=True)
    assert taken == ways  # the CPU's scan adds in float64, and must not be believed
    assert packet.centre[3].tobytes() == b"\0\0"


def test_a_scan_that_adds_in_order_is_believed() -> None:
    rows = torch.from_numpy(np.random.default_rng(1).integers(-99, 99, (50, 7)).astype(np.float32))
    rows[:, 2] = -0.0
    wanted, sure = torch_rows._sum_one_by_one(rows)
    assert sure
    sums, sure = torch_rows._sum_by_scan(rows)
    assert sure and bits_of(sums) == bits_of(wanted)
    rows[20, 4] = 2.0**30 + 1  # from here on float32 rounds, float64 does not
    wanted, _ = torch_rows._sum_one_by_one(rows)
    sums, sure = torch_rows._sum_by_scan(rows)
    assert not sure and sums[4] != wanted[4]


def test_rows_that_are_part_of_something_wider() -> None:
    positions, rows, tiers, layout = centred_span(12)
    tiers[5] = Tier.NATIVE
    wider = torch.full((24, layout.width + 3), 7.0)
    wider[::2, 2:-1] = to_torch(rows)
    given = wider[::2, 2:-1]
    packet = torch_codec.encode_packet(4, 5, 6, positions, given, tiers, layout)
    assert packet.checksum == encode_both(positions, rows, tiers, layout).checksum


def test_a_packet_owns_its_bytes() -> None:
    positions, rows, tiers, layout = centred_span(8)
    for plan in (tiers, np.full(8, Tier.NATIVE, np.uint8)):
        given, own_tiers, own_positions = to_torch(rows), plan.copy(), positions.copy()
        packet = torch_codec.encode_packet(0, 0, 0, own_positions, given, own_tiers, layout)
        given[:], own_tiers[:], own_positions[:] = 0, 0, 0
        verify(packet, layout, "exact")
        decoded = torch_codec.decode_packet(packet, layout, "exact", "cpu")[1]
        decoded[:] = 0
        verify(packet, layout, "exact")


def test_arguments_that_do_not_belong_together() -> None:
    positions, rows, tiers, layout = centred_span(3)
    tiers[:] = Tier.INT8
    good = (positions, rows, tiers, layout)
    encode_both(*good)
    for place, bad in [
        (0, positions.astype(np.int64)),
        (0, positions[:2]),
        (1, rows[:2]),
        (1, rows[:, :63]),
        (1, rows[0]),
        (2, tiers.astype(np.int32)),
        (2, np.array([2, 5, 2], np.uint8)),
        (3, LATENT),
    ]:
        arguments = list(good)
        arguments[place] = bad
        with pytest.raises(ValueError):
            encode_both(*arguments)
    with pytest.raises(ValueError, match="K8V4"):
        encode_both(positions, rows[:, :40], np.full(3, Tier.K8V4, np.uint8), LATENT)
    for dtype in (torch.float64, torch.float16, torch.int16):
        with pytest.raises(ValueError, match="bfloat16 or float32"):
            torch_codec.encode_packet(0, 0, 0, positions, to_torch(rows).to(dtype), tiers, layout)


def resealed(packet: KVPacket, field: str, value: object) -> KVPacket:
    other = copy.copy(packet)
    object.__setattr__(other, field, value)
    object.__setattr__(other, "checksum", checksum(other))
    return other


@pytest.mark.parametrize("value", [0x7C00, 0xFC00, 0x7E01])
@pytest.mark.parametrize(
    ("field", "key"), [("scales", 2), ("scales", 4), ("centre", None), ("payload", 1)]
)
def test_what_is_not_finite_is_refused(field: str, key: int | None, value: int) -> None:
    packet = encode_both(*centred_span(8), centre_keys=True)
    arrays = getattr(packet, field)
    array = (arrays if key is None else arrays[key]).copy()
    array.reshape(-1).view(np.uint16)[-1] = value
    other = resealed(packet, field, array if key is None else {**arrays, key: array})
    refused_alike(other)


def refused_alike(packet: KVPacket) -> None:
    with pytest.raises(PacketRefused, match=r"layer 6.*finite") as wanted:
        native.decode_packet(packet, GROUPED, "exact")
    with pytest.raises(PacketRefused) as got:
        torch_codec.decode_packet(packet, GROUPED, "exact", "cpu")
    assert str(got.value) == str(wanted.value)


def test_a_centre_that_nothing_uses_is_checked_alike() -> None:
    positions, rows, tiers, layout = centred_span(8)
    centre = np.full(layout.centred_width, np.inf, np.float16)
    tiers[:] = Tier.NATIVE
    decode_both(
        resealed(encode_both(positions, rows, tiers, layout), "centre", centre), layout, "exact"
    )
    tiers[4] = Tier.FP16
    refused_alike(resealed(encode_both(positions, rows, tiers, layout), "centre", centre))


def test_native_rows_of_a_packet_may_be_strided() -> None:
    positions, rows, _, _ = centred_span(8)
    packet = native.native_packet(4, 5, 6, positions, rows[:, 1:2])
    decode_both(packet, KVLayout((Part(0, 1, "key"),)), "exact")


def test_what_is_damaged_or_foreign_is_refused() -> None:
    packet = encode_both(*centred_span(8))
    torch_codec.decode_packet(packet, GROUPED, "exact", "cpu")
    damaged = copy.copy(packet)
    object.__setattr__(damaged, "layer", 7)
    for refused, layout, compute in [
        (damaged, GROUPED, "exact"), (packet, LATENT, "exact"), (packet, grouped(4, 8), "exact"),
    ]:  # fmt: skip
        with pytest.raises(PacketRefused):
            torch_codec.decode_packet(refused, layout, compute, "cpu")
