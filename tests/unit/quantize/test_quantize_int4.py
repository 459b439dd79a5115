import numpy as np
import pytest
from quantize_reference import bf16_values, normal

from moechat.quantize.int4 import encode_int4


def decoded(rows):
    shape = (rows.packed.shape[0], rows.packed.shape[1] * 8)
    nibbles = [(rows.packed.view(np.uint32) >> (4 * place)) & 15 for place in range(8)]
    whole = np.stack(nibbles, axis=-1).reshape(shape).astype(np.float64) - 8
    return whole * bf16_values(rows.scale).repeat(32, 1)


def relative(values, approximation):
    values = values.astype(np.float64)
    return np.sqrt(((values - approximation) ** 2).sum() / (values**2).sum())


def plain_rounding(values, steps):
    """The usual way: the scale that takes the largest magnitude to ``steps``."""
    groups = values.astype(np.float64).reshape(-1, 32)
    scale = np.abs(groups).max(axis=1, keepdims=True) / steps
    return (np.clip(np.rint(groups / scale), -8, 7) * scale).reshape(values.shape)


def test_types_and_shapes():
    rows = encode_int4(normal(1, 5, 96))
    assert (rows.packed.dtype, rows.packed.shape) == (np.int32, (5, 12))
    assert (rows.scale.dtype, rows.scale.shape) == (np.uint16, (5, 3))


def test_reported_squares_are_those_of_the_difference():
    values = normal(2, 300, 1024) * 0.02
    rows = encode_int4(values)
    error = ((values.astype(np.float64) - decoded(rows)) ** 2).sum()
    assert rows.squared_error == pytest.approx(error, rel=1e-5)
    assert rows.squared_sum == pytest.approx((values.astype(np.float64) ** 2).sum(), rel=1e-6)


@pytest.mark.parametrize("degrees", [3, 5, 1000])
def test_error_is_well_below_that_of_plain_rounding(degrees):
    values = np.random.default_rng(3).standard_t(degrees, (256, 512)).astype(np.float32)
    error = relative(values, decoded(encode_int4(values)))
    usual = min(relative(values, plain_rounding(values, steps)) for steps in (7, 7.5, 8))
    assert error < 0.89 * usual
    assert error < 0.86 * relative(values, plain_rounding(values, 7))


def test_error_is_near_the_least_that_any_scale_gives():
    values = normal(4, 40, 64)
    groups = values.astype(np.float64).reshape(-1, 32)
    largest = np.abs(groups).max(axis=1, keepdims=True)
    least = np.full(len(groups), np.inf)
    for steps in np.linspace(-12, 12, 2001):
        scale = largest / steps if steps else largest
        difference = groups - np.clip(np.rint(groups / scale), -8, 7) * scale
        least = np.minimum(least, (difference**2).sum(axis=1))
    assert encode_int4(values).squared_error < 1.02 * least.sum()


def test_only_the_ends_of_the_range_are_off_by_more_than_half_a_step():
    values = normal(5, 64, 128)
    rows = encode_int4(values)
    step = bf16_values(rows.scale).repeat(32, 1)
    off = np.abs(values - decoded(rows)) / np.abs(step)
    whole = decoded(rows) / step
    inside = (whole > -8) & (whole < 7)
    assert off[inside].max() <= 0.501  # the reciprocal of a step is rounded, too
    # The extreme is tried at up to 8.45 steps, and 7 is the end of the other side.
    assert off.max() <= 1.6


def test_what_int4_holds_exactly_stays_exact():
    random = np.random.default_rng(6)
    whole = random.integers(-8, 8, (16, 64))
    whole[:, ::32] = -8
    values = (whole * np.repeat(2.0 ** random.integers(-9, 9, (16, 2)), 32, 1)).astype(np.float32)
    rows = encode_int4(values)
    np.testing.assert_array_equal(decoded(rows), values)
    assert rows.squared_error == 0


def test_a_positive_extreme_uses_the_long_side_through_a_negative_scale():
    values = np.zeros((1, 64), np.float32)
    values[0, :3] = 8, -7, 1
    values[0, 32:35] = -8, 7, 1
    rows = encode_int4(values)
    np.testing.assert_array_equal(bf16_values(rows.scale), [[-1, 1]])
    np.testing.assert_array_equal(decoded(rows), values)


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-31])
def test_zero_and_nearly_zero_groups_become_zero(size):
    values = np.full((2, 64), size, np.float32)
    values[1, 32:] = 1
    rows = encode_int4(values)
    assert np.isfinite(bf16_values(rows.scale)).all()
    np.testing.assert_array_equal(decoded(rows)[0], np.zeros(64))
    assert decoded(rows)[1, 40] == pytest.approx(1, rel=1e-2)


@pytest.mark.parametrize("size", [1e-29, 1e-20, 1e18, 1e30, 3e38])
def test_the_size_of_the_values_does_not_matter(size):
    values = np.clip(normal(7, 4, 64) / 4, -1, 1)
    error = relative(values, decoded(encode_int4(values)))
    scaled = (values.astype(np.float64) * size).astype(np.float32)
    assert relative(scaled / size, decoded(encode_int4(scaled)) / size) == pytest.approx(
        error, rel=0.02
    )


def test_rows_do_not_depend_on_their_neighbours():
    values = normal(8, 300, 512)  # several pieces
    whole = encode_int4(values)
    for first, last in ((0, 1), (7, 40), (290, 300)):
        part = encode_int4(values[first:last])
        np.testing.assert_array_equal(part.packed, whole.packed[first:last])
        np.testing.assert_array_equal(part.scale, whole.scale[first:last])
