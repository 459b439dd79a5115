"""gemv, gemm and gemv_transposed against float64, on every instruction set that runs here."""

from __future__ import annotations

import numpy as np
import pytest
from formats import FP8_VALUES
from products import DIFFICULT, case, check, num_inputs
from reference import (
    BF16,
    F32,
    FP8,
    VARIANTS,
    Variant,
    activations,
    make_weight,
    with_nan,
    with_scales,
)
from shapes import GEMM_ROWS, PLACED_SHAPES, RAGGED_SHAPES, SHAPES, Shape

from moechat import _native

PLAIN = (F32, BF16, FP8)
KERNELS = ("gemv", "gemm", "gemv_transposed")
COMPUTES = ("bf16", "exact")


@pytest.mark.parametrize("variant", PLAIN, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_products_match_float64(isa: str, shape: Shape, variant: Variant) -> None:
    for kernel in KERNELS:
        for compute in COMPUTES:
            for num_rows in (1, 3):
                check(shape, variant, kernel, compute, num_rows)


@pytest.mark.parametrize(
    "variant", [variant for variant in VARIANTS if variant not in PLAIN], ids=str
)
def test_every_format_matches_float64(isa: str, variant: Variant) -> None:
    for shape in [*RAGGED_SHAPES, *PLACED_SHAPES]:
        if shape.rows * shape.cols > 50_000:
            continue
        for kernel in KERNELS:
            for num_rows in (1, 3):
                compute = COMPUTES[(shape.rows + shape.cols + num_rows) % 2]
                check(shape, variant, kernel, compute, num_rows)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_number_of_rows(isa: str, variant: Variant) -> None:
    shape = Shape("rows", 37, 136, row_origin=100, col_origin=57)
    for kernel in KERNELS:
        for num_rows in range(1, 17) if kernel == "gemv" else GEMM_ROWS:
            check(shape, variant, kernel, COMPUTES[num_rows % 2], num_rows)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_difficult_values(isa: str, variant: Variant) -> None:
    for kinds in DIFFICULT:
        for kernel in KERNELS:
            for compute in COMPUTES:
                check(Shape("values", 40, 328), variant, kernel, compute, 2, kinds)


def test_bf16_and_exact_differ(isa: str) -> None:
    weight = case(Shape("values", 40, 328), F32)
    x = activations((1, 328), "normal", 1)
    for kernel in ("gemv", "gemm"):
        assert (weight.run(kernel, x, "bf16") != weight.run(kernel, x, "exact")).any()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_one_hot_inputs_give_the_weights_themselves(isa: str, variant: Variant) -> None:
    weight = case(Shape("one_hot", 19, 139, row_origin=7, col_origin=24, gap=3), variant, "heavy")
    wanted = weight.values.astype(np.float32)
    by_row, by_column = (np.eye(n, dtype=np.float32) for n in wanted.shape)
    for compute in COMPUTES:
        y = weight.run("gemm", by_column, compute)
        np.testing.assert_array_equal(y.T, wanted)
        y = weight.run("gemv_transposed", by_row, compute)
        np.testing.assert_array_equal(y, wanted)
        for k in range(0, len(by_column), 11):
            for num_rows in (1, 5):
                y = weight.run("gemv", by_column[k : k + num_rows], compute)
                np.testing.assert_array_equal(y.T, wanted[:, k : k + num_rows])


@pytest.mark.parametrize("position", [0, 1, 7, 8, 15, 31, 32, 63, 64, 71])
def test_every_fp8_code_at_every_lane(isa: str, position: int) -> None:
    for compute in COMPUTES:
        check_fp8_codes(compute, position)


def check_fp8_codes(compute: str, position: int) -> None:
    codes = np.zeros((256, 72), np.uint8)
    codes[:, position] = np.arange(256)
    weight = make_weight(Shape("codes", 256, 72), FP8, codes)
    for num_rows in (1, 2):
        x = np.ones((num_rows, 72), np.float32)
        for kernel in ("gemv", "gemm"):
            for row in weight.run(kernel, x, compute):
                np.testing.assert_array_equal(row, FP8_VALUES.astype(np.float32))
    across = make_weight(Shape("across", 2, 256), FP8, np.array([[0] * 256, range(256)], np.uint8))
    for row in across.run("gemv_transposed", np.ones((3, 2), np.float32), compute):
        np.testing.assert_array_equal(row, FP8_VALUES.astype(np.float32))


# Tiny scales at every place: zero, and denormal where the type has them.
EDGE_SCALES = {
    "f32": np.array([0, 1e-44, 1e-40, 2**-126, -1e-39, 1], np.float32),
    "bf16": np.array([0, 0x8000, 1, 0x40, 0x80, 0x3F80], np.uint16),
    "f16": np.array([0, 0x8000, 1, 0x3FF, 0x400, 0x8001], np.uint16),
    "e8m0": np.array([0, 1, 2, 126, 127, 128], np.uint8),
}


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_zero_and_denormal_scales(isa: str, variant: Variant) -> None:
    weight = with_scales(Shape("edges", 19, 264), variant, EDGE_SCALES)
    wanted = weight.values.astype(np.float32)
    x = np.eye(wanted.shape[1], dtype=np.float32)
    for compute in COMPUTES:
        np.testing.assert_array_equal(weight.run("gemm", x, compute).T, wanted)
        for num_rows in (1, 10):
            for k in range(0, len(x), 24):
                y = weight.run("gemv", x[k : k + num_rows], compute)
                np.testing.assert_array_equal(y, wanted.T[k : k + num_rows])
        across = weight.run("gemv_transposed", np.eye(len(wanted), dtype=np.float32), compute)
        np.testing.assert_array_equal(across, wanted)
    for row in range(3):
        np.testing.assert_array_equal(_native.decode_row(weight.view, row), wanted[row])


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_nan_goes_where_it_belongs_and_nowhere_else(isa: str, variant: Variant) -> None:
    shape = Shape("nan", 141, 300)
    good = case(shape, variant)
    weight = with_nan(good)
    nan = np.isnan(weight.values)
    assert nan.any() and not nan.all()
    for compute in COMPUTES:
        for kernel in KERNELS:
            lanes = nan.any(0 if kernel == "gemv_transposed" else 1)
            x = activations((4, num_inputs(weight, kernel)), "normal", 3)
            y = weight.run(kernel, x, compute)
            np.testing.assert_array_equal(np.isnan(y), np.broadcast_to(lanes, y.shape))
            x[2, 5] = np.nan
            y = good.run(kernel, x, compute)
            assert np.isnan(y[2]).all(), f"{kernel} {compute}: NaN in x is lost"
            assert np.isfinite(np.delete(y, 2, 0)).all()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_decode_row_is_exact(variant: Variant) -> None:
    weight = case(Shape("rows", 9, 300, row_origin=3, col_origin=40, gap=1), variant)
    for row in (0, 1, len(weight.values) - 1):
        decoded = _native.decode_row(weight.view, row)
        np.testing.assert_array_equal(decoded, weight.values[row].astype(np.float32))
