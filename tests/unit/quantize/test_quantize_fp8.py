import numpy as np
import pytest
from quantize_reference import FP8_VALUES, normal

from moechat.quantize.fp8 import encode_fp8


def decoded(rows):
    shape = rows.codes.shape
    scale = rows.scale.astype(np.float64).repeat(128, 0)[: shape[0]].repeat(128, 1)[:, : shape[1]]
    return FP8_VALUES[rows.codes] * scale


@pytest.mark.parametrize(
    "shape", [(128, 128), (256, 1024), (1, 1), (129, 127), (130, 1153), (64, 2048), (300, 31)]
)
def test_blocks_of_any_shape_round_within_half_a_step(shape):
    values = normal(1, *shape)
    rows = encode_fp8(values)
    assert rows.scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    approximation = decoded(rows)
    scale = np.abs(rows.scale).repeat(128, 0)[: shape[0]].repeat(128, 1)[:, : shape[1]]
    # Half a step: 2^-4 of a normal value, half of 2^-9 of a subnormal one.
    bound = np.maximum(np.abs(values) * 2.0**-4, scale * 2.0**-10)
    assert (np.abs(values - approximation) <= bound * 1.0001).all()
    error = ((values.astype(np.float64) - approximation) ** 2).sum()
    assert rows.squared_error == pytest.approx(error, rel=1e-5, abs=1e-15)
    assert rows.squared_sum == pytest.approx((values.astype(np.float64) ** 2).sum(), rel=1e-6)


def test_the_largest_of_each_block_is_448():
    values = normal(2, 200, 300)
    codes = encode_fp8(values).codes
    for row in (0, 128):
        for col in (0, 128, 256):
            block = np.abs(FP8_VALUES[codes[row : row + 128, col : col + 128]])
            assert block.max() == 448


def test_zero_blocks_have_a_usable_scale():
    values = np.zeros((128, 384), np.float32)
    values[:, 128:256] = 1
    values[:, 256:] = 1e-40
    rows = encode_fp8(values)
    assert (rows.scale > 0).all()
    np.testing.assert_array_equal(decoded(rows)[:, [0, 300]], 0)
    np.testing.assert_allclose(decoded(rows)[:, 200], 1, rtol=1e-6)


@pytest.mark.parametrize("size", [1e-30, 1e30, 3e38])
def test_the_size_of_the_values_does_not_matter(size):
    values = np.clip(normal(3, 128, 128) / 4, -1, 1)
    scaled = (values.astype(np.float64) * size).astype(np.float32)
    error = np.abs(decoded(encode_fp8(scaled)) / size - values).max()
    assert error < 2.0**-4


def test_blocks_do_not_depend_on_their_neighbours():
    values = normal(4, 384, 1500)  # several tiles
    whole = encode_fp8(values)
    part = encode_fp8(values[128:256])
    np.testing.assert_array_equal(part.codes, whole.codes[128:256])
    np.testing.assert_array_equal(part.scale, whole.scale[1:2])
    part = encode_fp8(np.ascontiguousarray(values[:, 1024:]))
    np.testing.assert_array_equal(part.codes, whole.codes[:, 1024:])
