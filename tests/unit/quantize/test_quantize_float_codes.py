import numpy as np
from quantize_reference import FP8_VALUES, bf16, bf16_values

from moechat.quantize.float_codes import (
    bf16_is_finite,
    bf16_to_f32,
    e4m3_has_nan,
    e4m3_to_f32,
    e8m0_to_f32,
    f32_to_bf16,
    f32_to_e4m3,
)

ALL_CODES = np.arange(256, dtype=np.uint8)
FINITE_CODES = ALL_CODES[~np.isnan(FP8_VALUES)]


def nearest_codes(values):
    """By comparing with every value there is; of two that are equally near, the even code."""
    positive = FP8_VALUES[:127]
    distance = np.abs(np.abs(values.astype(np.float64))[:, None] - positive)
    # Each code's parity decides ties: a tiny handicap for odd ones.
    best = np.argmin(distance * (1 + 1e-12 * (np.arange(127) & 1)), axis=1)
    return (best + 128 * np.signbit(values)).astype(np.uint8)


def test_every_e4m3_code_decodes_to_its_value():
    values = e4m3_to_f32(FINITE_CODES)
    np.testing.assert_array_equal(values, FP8_VALUES[FINITE_CODES].astype(np.float32))
    assert np.signbit(values[127]) and values[127] == 0


def test_every_e4m3_value_encodes_to_its_code():
    values = FP8_VALUES[FINITE_CODES].astype(np.float32)
    np.testing.assert_array_equal(f32_to_e4m3(values), FINITE_CODES)


def test_e4m3_rounds_to_nearest_even_also_between_subnormals():
    positive = FP8_VALUES[:127].astype(np.float32)
    middles = (positive[1:] + positive[:-1]) / 2
    near = [np.nextafter(middles, np.float32(side)) for side in (0, 1000)]
    values = np.concatenate([middles, *near])
    values = np.concatenate([values, -values])
    np.testing.assert_array_equal(f32_to_e4m3(values), nearest_codes(values))


def test_e4m3_of_random_values_of_all_sizes_is_the_nearest():
    random = np.random.default_rng(1)
    values = random.standard_normal(20_000) * 2.0 ** random.integers(-14, 9, 20_000)
    values = np.clip(values, -448, 448).astype(np.float32)
    np.testing.assert_array_equal(f32_to_e4m3(values), nearest_codes(values))


def test_e4m3_saturates_and_keeps_the_sign_of_zero():
    values = np.array([448, 449, 464, 465, 1e30, -500, 0, -0.0, 1e-45, -1e-45], np.float32)
    codes = [0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0, 0x80, 0, 0x80]
    np.testing.assert_array_equal(f32_to_e4m3(values), codes)


def test_e4m3_keeps_the_shape_across_pieces():
    values = np.linspace(-448, 448, 3 * 70_001, dtype=np.float32).reshape(3, -1)
    codes = f32_to_e4m3(values)
    assert codes.shape == values.shape
    np.testing.assert_array_equal(codes[2, -5:], nearest_codes(values[2, -5:]))
    np.testing.assert_array_equal(f32_to_e4m3(values[:, ::2]), codes[:, ::2])


def test_nan_codes_are_seen():
    for code in ALL_CODES:
        assert e4m3_has_nan(np.array([0, code], np.uint8)) is bool(code in (0x7F, 0xFF))


def test_bf16_rounds_to_nearest_even_and_back():
    random = np.random.default_rng(2)
    bits = random.integers(0, 1 << 32, 100_000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = values[np.isfinite(values) & (np.abs(values) < 3.3e38)]
    ties = (bf16(values).astype(np.uint32) << 16 | 0x8000).view(np.float32)
    for given in (values, ties[np.isfinite(ties) & (np.abs(ties) < 3.3e38)]):
        np.testing.assert_array_equal(f32_to_bf16(given), bf16(given))
    codes = np.arange(1 << 16, dtype=np.uint16)
    finite = np.isfinite(bf16_values(codes))
    np.testing.assert_array_equal(bf16_to_f32(codes)[finite], bf16_values(codes)[finite])


def test_what_is_too_large_for_bf16_is_noticed():
    largest = np.array([3.3895e38, -3.3895e38], np.float32)
    assert bf16_is_finite(f32_to_bf16(largest))
    assert not bf16_is_finite(f32_to_bf16(np.array([1, 3.4e38], np.float32)))


def test_e8m0_is_a_power_of_two():
    values = e8m0_to_f32(np.array([0, 1, 126, 127, 128, 254], np.uint8))
    np.testing.assert_array_equal(values, 2.0 ** np.array([-127, -126, -1, 0, 1, 127]))
