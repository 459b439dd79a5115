"""gemm of the prefill: more rows than a gemv takes, on every instruction set that runs here."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from formats import FP8_VALUES, bf16_bits, bf16_values
from products import DIFFICULT, case, check
from reference import FP8, VARIANTS, Variant, activations, make_weight, with_nan, with_scales
from shapes import Shape
from tolerances import SMALLEST_NORMAL

STORED_AS_OUTPUTS = [variant for variant in VARIANTS if not variant.transposed]
BY_VARIANT = pytest.mark.parametrize("variant", STORED_AS_OUTPUTS, ids=str)
SHAPES = [
    Shape("one_output", 1, 328),
    Shape("one_column", 40, 1),
    Shape("ragged", 45, 330),
    Shape("odd_tiles", 17, 1300),
    Shape("placed", 136, 200, row_origin=100, col_origin=57, gap=3, offset_bytes=1),
    Shape("narrow_blocks", 21, 136, block=(8, 40), row_origin=3, col_origin=9),
    Shape("blocks_beyond_a_group", 33, 700, block=(128, 129), col_origin=1),
    Shape("very_narrow_blocks", 18, 130, block=(16, 8)),
]
ROWS = (17, 31, 33, 300)


@BY_VARIANT
def test_products_match_float64(isa: str, variant: Variant) -> None:
    for shape in SHAPES:
        for num_rows in ROWS[:3]:
            check(shape, variant, "gemm", "bf16", num_rows)
    check(SHAPES[2], variant, "gemm", "bf16", ROWS[3])
    check(SHAPES[2], variant, "gemm", "exact", ROWS[0])


@pytest.mark.parametrize("variant", [FP8, Variant("q4_k"), Variant("bf16")], ids=str)
def test_more_outputs_than_fit_at_a_time(isa: str, variant: Variant) -> None:
    check(Shape("tall", 1100, 40), variant, "gemm", "bf16", 270)


@BY_VARIANT
def test_difficult_values(isa: str, variant: Variant) -> None:
    for kinds in DIFFICULT:
        check(Shape("values", 40, 328), variant, "gemm", "bf16", 18, kinds)


@BY_VARIANT
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_inputs_of_extreme_size_keep_their_digits(isa: str, variant: Variant, size: float) -> None:
    """A power of two scales the result; terms below float32's normal range may be lost."""
    factor = np.float32(2.0 ** round(np.log2(size)))
    weight = case(Shape("values", 40, 520), variant)
    x = activations((20, weight.shape.cols), "normal", 5)
    y = weight.run("gemm", x, "bf16")
    error = np.abs(weight.run("gemm", x * factor, "bf16") - y * factor)
    assert (error <= x.shape[1] * SMALLEST_NORMAL).all()


@BY_VARIANT
def test_nan_goes_where_it_belongs_and_nowhere_else(isa: str, variant: Variant) -> None:
    good = case(Shape("nan", 141, 300), variant)
    weight = with_nan(good)
    nan = np.isnan(weight.values).any(1)
    assert nan.any() and not nan.all()
    x = activations((35, weight.shape.cols), "normal", 3)
    y = weight.run("gemm", x, "bf16")
    np.testing.assert_array_equal(np.isnan(y), np.broadcast_to(nan, y.shape))
    x[20, 5] = np.nan
    y = good.run("gemm", x, "bf16")
    assert np.isnan(y[20]).all()
    assert np.isfinite(np.delete(y, 20, 0)).all()


@pytest.mark.parametrize("position", [0, 1, 7, 8, 31, 32, 63, 64, 71])
def test_every_fp8_code_at_every_lane(isa: str, position: int) -> None:
    codes = np.zeros((256, 72), np.uint8)
    codes[:, position] = np.arange(256)
    weight = make_weight(Shape("codes", 256, 72), FP8, codes)
    for row in weight.run("gemm", np.ones((17, 72), np.float32), "bf16"):
        np.testing.assert_array_equal(row, FP8_VALUES.astype(np.float32))


@pytest.mark.parametrize("code", [0, 1, 2, 3, 60, 127, 200, 251, 252, 253, 254, 255])
@pytest.mark.parametrize("format", ["mxfp4", "mxfp4_block"])
def test_scales_at_the_ends_of_e8m0(isa: str, format: str, code: int) -> None:
    """Where BF16 has no such number, too; 2^-127 and what overflows float32 included."""
    variant = next(variant for variant in VARIANTS if variant.format == format)
    choices = {"e8m0": np.array([code, 127], np.uint8)}
    weight = with_scales(Shape("edges", 19, 96), variant, choices)
    with np.errstate(over="ignore"):
        wanted = weight.values.astype(np.float32)
    nan = np.isnan(wanted).any(1) if code == 255 else np.zeros(len(wanted), bool)
    y = weight.run("gemm", np.eye(96, dtype=np.float32), "bf16")
    overflow = np.isinf(wanted).any(1)  # infinity times the zeros of other rows of x
    keep = ~nan & ~overflow
    assert code >= 253 or keep.all()
    np.testing.assert_array_equal(y.T[keep], wanted[keep])
    assert np.isnan(y.T[nan]).all()


@BY_VARIANT
def test_a_range_of_outputs_leaves_the_others_alone(isa: str, variant: Variant) -> None:
    weight = case(Shape("range", 200, 264, row_origin=5), variant)
    x = activations((21, weight.shape.cols), "normal", 8)
    whole = weight.run("gemm", x, "bf16")
    for begin, end in [(0, 1), (7, 58), (64, 128), (199, 200), (3, 3)]:
        out = np.full_like(whole, 7)
        weight.run("gemm", x, "bf16", begin, end, out)
        np.testing.assert_array_equal(out[:, begin:end], whole[:, begin:end])
        assert (np.delete(out, np.s_[begin:end], 1) == 7).all()


def test_threads_do_not_meet(isa: str) -> None:
    weight = case(Shape("threads", 136, 520), FP8)
    inputs = [activations((40 + i, 520), "normal", i) for i in range(6)]
    wanted = [weight.run("gemm", x, "bf16") for x in inputs]
    with ThreadPoolExecutor(3) as pool:
        for _ in range(5):
            results = list(pool.map(lambda x: weight.run("gemm", x, "bf16"), inputs))
            for y, expected in zip(results, wanted, strict=True):
                np.testing.assert_array_equal(y, expected)


def test_bf16_rounds_inputs_and_exact_does_not(isa: str) -> None:
    weight = case(Shape("values", 40, 328), FP8)
    x = activations((20, 328), "normal", 1)
    y = weight.run("gemm", x, "bf16")
    np.testing.assert_array_equal(y, weight.run("gemm", bf16_values(bf16_bits(x)), "bf16"))
    assert (y != weight.run("gemm", x, "exact")).any()
