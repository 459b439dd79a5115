"""The KV codec against numpy, byte for byte, on every instruction set that runs here."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from formats import bf16_bits
from kv_codec_reference import Parts, decode, encode

from moechat import _native

NO_CENTRE = np.empty(0, np.float16)
# Widths around the vectors' own, odd ones, and all codes in one row.
PARTS: list[Parts] = [
    [(0, 64, "int8"), (64, 64, "int4")],
    [(0, 512, "int4"), (512, 64, "int8")],
    [(0, 512, "int8"), (512, 64, "f16")],
    [(0, 128, "f16"), (128, 128, "f16")],
    [(0, 1, "int4"), (1, 1, "int8"), (2, 1, "f16"), (3, 33, "int4"), (36, 17, "f16")],
    [(0, 7, "f16"), (7, 31, "int8"), (38, 15, "int4"), (53, 200, "f16"), (253, 47, "int8")],
]


def random_rows(num_rows: int, width: int, bf16: bool, seed: int = 1) -> np.ndarray:
    """Magnitudes from the tiny to the large, some rows all zero, ties among the codes."""
    random = np.random.default_rng(seed)
    rows = random.standard_normal((num_rows, width)) * 10.0 ** random.uniform(-9, 4, (num_rows, 1))
    rows[::5] = np.rint(rows[::5] * 4) / 2
    rows[3] = 0
    rows[7, : width // 2], rows[7, width // 2 :] = 3.5, -3.5  # INT4 cuts one of them
    rows[4, 1:] = -0.0
    rows = rows.clip(-65504, 65504).astype(np.float32)
    return bf16_bits(rows) if bf16 else rows


def inputs(
    parts: tuple[tuple[int, int, str], ...], centred: int, bf16: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, the chosen of them, and a centre of the first ``centred`` parts."""
    rows = random_rows(40, parts[-1][0] + parts[-1][1], bf16)
    width = sum(part[1] for part in parts[:centred])
    centre = np.random.default_rng(2).standard_normal(width).astype(np.float16)
    return rows, np.flatnonzero(np.arange(40) % 3), centre


@cache
def reference(
    parts: tuple[tuple[int, int, str], ...], centred: int, bf16: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Payload, scales and decoded rows, once for all instruction sets."""
    rows, chosen, centre = inputs(parts, centred, bf16)
    payload, scales = encode(rows[chosen], list(parts), centre)
    return payload, scales, decode(payload, scales, list(parts), centre, bf16)


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("centred", [0, 1, 2])
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_same_bytes_as_the_reference(isa: str, parts: Parts, centred: int, bf16: bool) -> None:
    rows, chosen, centre = inputs(tuple(parts), centred, bf16)
    payload, scales = _native.kv_encode(rows, chosen, parts, centre)
    wanted_payload, wanted_scales, wanted = reference(tuple(parts), centred, bf16)
    assert payload.dtype == np.uint8 and scales.dtype == np.float16
    assert payload.tobytes() == wanted_payload.tobytes()
    assert scales.tobytes() == wanted_scales.tobytes()

    out = np.full_like(rows, 7)
    _native.kv_decode(payload, scales, parts, centre, out, chosen)
    assert out[chosen].tobytes() == wanted.tobytes()
    assert np.all(out[np.arange(40) % 3 == 0] == 7)


def test_every_float16_and_every_tie_between_two(isa: str) -> None:
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16)
    values = halves.astype(np.float32)
    between = (values[1:] + values[:-1]) / 2  # exact
    neighbours = [np.nextafter(between, np.float32(end)) for end in (0, np.inf)]
    row = np.concatenate([values, between, *neighbours])
    row = np.concatenate([row, -row])[None]
    parts = [(0, row.size, "f16")]
    payload, scales = _native.kv_encode(row, np.array([0]), parts)
    assert payload.tobytes() == row.astype("<f2").tobytes() and scales.shape == (1, 0)
    back = np.empty_like(row)
    _native.kv_decode(payload, scales, parts, None, back, np.array([0]))
    assert back.tobytes() == row.astype(np.float16).astype(np.float32).tobytes()


@pytest.mark.parametrize("code", ["f16", "int8", "int4"])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf, 3e38, -3e38])
@pytest.mark.parametrize("place", [0, 15, 16, 36])
def test_what_cannot_be_coded_is_named(isa: str, code: str, bad: float, place: int) -> None:
    rows = np.ones((3, 37), np.float32)
    rows[1, place] = bad
    for given in (rows, bf16_bits(rows)):
        with pytest.raises(_native.NativeError) as caught:
            _native.kv_encode(given, np.arange(3), [(0, 37, code)])
        assert caught.value.args[0] == "kv-not-encodable" and "row 1" in caught.value.args[1]
        _native.kv_encode(given, np.array([0, 2]), [(0, 37, code)])


@pytest.mark.parametrize(
    ("code", "largest"), [("f16", 65504.0), ("int8", 65504.0 * 127), ("int4", 65504.0 * 8)]
)
def test_the_largest_that_can_be_coded(isa: str, code: str, largest: float) -> None:
    row = np.full((1, 16), largest, np.float32)
    payload, scales = _native.kv_encode(row, np.array([0]), [(0, 16, code)])
    back = np.empty_like(row)
    _native.kv_decode(payload, scales, [(0, 16, code)], None, back, np.array([0]))
    assert np.all(back == row)
    with pytest.raises(_native.NativeError):
        _native.kv_encode(row * np.float32(1.001), np.array([0]), [(0, 16, code)])


@pytest.mark.parametrize("bf16", [True, False])
def test_the_centre_is_the_mean(isa: str, bf16: bool) -> None:
    rows = random_rows(50, 37, bf16, seed=4)
    chosen = np.arange(0, 50, 2)
    values = rows[chosen].astype(np.uint32) << 16 if bf16 else rows[chosen]
    wide = values.view(np.float32) if bf16 else values
    total = np.zeros(37, np.float32)
    for row in wide:  # the order of the sum is part of the contract: same bytes everywhere
        total += row
    wanted = (total[:33] / np.float32(len(chosen))).astype(np.float16)
    assert _native.kv_centre(rows, chosen, 33).tobytes() == wanted.tobytes()
    assert _native.kv_centre(rows, np.arange(0), 37).tolist() == [0] * 37
    rows[4, 3] = 0x7FC0 if bf16 else np.nan
    with pytest.raises(_native.NativeError) as caught:
        _native.kv_centre(rows, chosen, 33)
    assert caught.value.args[0] == "kv-not-encodable" and "channel 3" in caught.value.args[1]


@pytest.mark.parametrize("value", [0x7C00, 0xFC00, 0x7E00])
@pytest.mark.parametrize("where", ["scale", "f16"])
def test_decoding_refuses_what_is_not_finite(isa: str, value: int, where: str) -> None:
    parts: Parts = [(0, 20, "int8"), (20, 20, "f16")]
    payload, scales = _native.kv_encode(np.ones((2, 40), np.float32), np.arange(2), parts)
    if where == "scale":
        scales.view(np.uint16)[1, 0] = value
    else:
        payload[1, 20 + 2 * 17 :].view(np.uint16)[0] = value
    with pytest.raises(_native.NativeError, match="finite"):
        _native.kv_decode(payload, scales, parts, None, np.empty((2, 40), np.uint16), np.arange(2))


ROWS = np.ones((4, 8), np.float32)
FOUR = np.arange(4)
INT8: Parts = [(0, 8, "int8")]


@pytest.mark.parametrize(
    ("rows", "chosen", "parts", "centre"),
    [
        (ROWS.astype(np.float64), FOUR, INT8, None),
        (ROWS.astype(">f4"), FOUR, INT8, None),
        (ROWS[0], FOUR, INT8, None),
        (ROWS[:, ::2], FOUR, [(0, 4, "int8")], None),
        (ROWS, FOUR.astype(np.int32), INT8, None),
        (ROWS, FOUR + 1, INT8, None),
        (ROWS, FOUR - 1, INT8, None),
        (ROWS, np.array([1, 1]), INT8, None),
        (ROWS, np.array([2, 1]), INT8, None),
        (ROWS, FOUR[None], INT8, None),
        (ROWS, np.arange(8)[::2], INT8, None),
        (ROWS, FOUR, [(0, 9, "int8")], None),
        (ROWS, FOUR, [(-1, 4, "int8")], None),
        (ROWS, FOUR, [(0, 0, "int8")], None),
        (ROWS, FOUR, [(1, 2**63 - 1, "int8")], None),
        (ROWS, FOUR, [(0, 4, "int8"), (3, 4, "int8")], None),
        (ROWS, FOUR, [(4, 4, "int8"), (0, 4, "int8")], None),
        (ROWS, FOUR, [(0, 8, "int5")], None),
        (ROWS, FOUR, INT8, np.zeros(9, np.float16)),
        (ROWS, FOUR, INT8, np.zeros(8, np.float32)),
        (ROWS, FOUR, INT8, np.full(8, np.inf, np.float16)),
        (ROWS, FOUR, INT8, np.zeros(16, np.float16)[::2]),
        (ROWS, FOUR, INT8, [0.0] * 8),
    ],
)
def test_encoding_checks_its_arguments(rows, chosen, parts, centre) -> None:
    with pytest.raises(_native.NativeError) as caught:
        _native.kv_encode(rows, chosen, parts, centre)
    assert caught.value.args[0] == "bad-argument"


def test_decoding_checks_its_arguments() -> None:
    payload, scales = _native.kv_encode(ROWS, FOUR, INT8)
    out = ROWS.copy()
    read_only = ROWS.copy()
    read_only.flags.writeable = False
    for bad in [
        (payload[:3], scales, INT8, None, out, FOUR),
        (payload[:, :7], scales, INT8, None, out, FOUR),
        (payload.view(np.int8), scales, INT8, None, out, FOUR),
        (payload, scales[:3], INT8, None, out, FOUR),
        (payload, scales[:, :0], INT8, None, out, FOUR),
        (payload, scales.view(np.uint16), INT8, None, out, FOUR),
        (payload, scales, [(0, 8, "int4")], None, out, FOUR),
        (payload, scales, INT8, np.zeros(9, np.float16), out, FOUR),
        (payload, scales, INT8, None, read_only, FOUR),
        (payload, scales, INT8, None, out[:3], FOUR),
        (payload, scales, INT8, None, out[:, :7], FOUR),
    ]:
        with pytest.raises(_native.NativeError) as caught:
            _native.kv_decode(*bad)
        assert caught.value.args[0] == "bad-argument"
    for rows, chosen, width in [(ROWS, FOUR, 9), (ROWS, FOUR, -1), (ROWS, FOUR + 1, 8)]:
        with pytest.raises(_native.NativeError):
            _native.kv_centre(rows, chosen, width)


def test_no_rows() -> None:
    nothing = np.arange(0)
    for rows in (ROWS, ROWS[:0]):
        payload, scales = _native.kv_encode(rows, nothing, INT8)
        assert payload.shape == (0, 8) and scales.shape == (0, 1)
        _native.kv_decode(payload, scales, INT8, None, rows.copy(), nothing)
