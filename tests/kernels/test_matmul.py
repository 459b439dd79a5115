"""gemv, gemm and gemv_transposed against float64, on every instruction set that runs here."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from reference import (
    FORMATS,
    FP8_VALUES,
    NAN_CODES,
    Weight,
    activations,
    make_weight,
    product,
    random_weight,
)
from shapes import GEMM_ROWS, SHAPES, Shape
from tolerances import COSINE_DISTANCE, product_bound

from moechat import _native

KERNELS = ("gemv", "gemm", "gemv_transposed")
COMPUTES = ("bf16", "exact")


@cache
def case(shape: Shape, format: str, kind: str = "normal") -> Weight:
    return random_weight(shape, format, seed=17, kind=kind)


def num_inputs(weight: Weight, kernel: str) -> int:
    return weight.shape.rows if kernel == "gemv_transposed" else weight.shape.cols


@cache
def expected(shape: Shape, format: str, kernel: str, compute: str, num_rows: int, kinds=()):
    weight_kind, x_kind = kinds or ("normal", "normal")
    weight = case(shape, format, weight_kind)
    x = activations((num_rows, num_inputs(weight, kernel)), x_kind, seed=num_rows)
    return weight, x, *product(weight, x, compute, kernel == "gemv_transposed")


def check(shape: Shape, format: str, kernel: str, compute: str, num_rows: int, kinds=()) -> None:
    weight, x, wanted, magnitude = expected(shape, format, kernel, compute, num_rows, kinds)
    y = getattr(_native, kernel)(weight.view, x, compute)
    label = f"{kernel} {compute} {num_rows} rows {shape}"
    error = np.abs(y - wanted)
    bound = product_bound(format, x.shape[1], magnitude)
    worst = np.unravel_index(np.argmax(error - bound), error.shape)
    assert (error <= bound).all(), f"{label}: {worst} is {y[worst]}, not {wanted[worst]}"
    lengths = np.linalg.norm(y.astype(np.float64)) * np.linalg.norm(wanted)
    if y.size > 1 and lengths > 0:
        distance = 1 - np.vdot(y.astype(np.float64), wanted) / lengths
        assert distance <= COSINE_DISTANCE[format], f"{label}: cosine distance {distance}"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_products_match_float64(isa: str, shape: Shape, format: str) -> None:
    for kernel in KERNELS:
        for compute in COMPUTES:
            for num_rows in (1, 3):
                check(shape, format, kernel, compute, num_rows)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_number_of_rows(isa: str, kernel: str, format: str) -> None:
    shape = Shape("rows", 37, 136, row_origin=100, col_origin=57)
    for num_rows in range(1, 17) if kernel == "gemv" else GEMM_ROWS:
        for compute in COMPUTES:
            check(shape, format, kernel, compute, num_rows)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "kinds",
    [
        ("normal", "small"),
        ("heavy", "heavy"),
        ("spike", "normal"),
        ("normal", "spike"),
        ("normal", "zeros"),
        ("subnormal", "small"),
    ],
    ids=" x ".join,
)
def test_difficult_values(isa: str, format: str, kinds: tuple[str, str]) -> None:
    for kernel in KERNELS:
        for compute in COMPUTES:
            check(Shape("values", 40, 328), format, kernel, compute, 2, kinds)


def test_bf16_and_exact_differ(isa: str) -> None:
    weight = case(Shape("values", 40, 328), "f32")
    x = activations((1, 328), "normal", 1)
    for kernel in ("gemv", "gemm"):
        run = getattr(_native, kernel)
        assert (run(weight.view, x, "bf16") != run(weight.view, x, "exact")).any()


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("position", [0, 1, 7, 8, 15, 31, 32, 63, 64, 71])
def test_every_fp8_code_at_every_lane(isa: str, compute: str, position: int) -> None:
    codes = np.zeros((256, 72), np.uint8)
    codes[:, position] = np.arange(256)
    weight = make_weight(Shape("codes", 256, 72), "fp8_block", codes)
    for num_rows in (1, 2):
        x = np.ones((num_rows, 72), np.float32)
        for kernel in ("gemv", "gemm"):
            y = getattr(_native, kernel)(weight.view, x, compute)
            for row in y:
                np.testing.assert_array_equal(row, FP8_VALUES.astype(np.float32))
    across = make_weight(
        Shape("across", 2, 256), "fp8_block", np.array([[0] * 256, range(256)], np.uint8)
    )
    y = _native.gemv_transposed(across.view, np.ones((3, 2), np.float32), compute)
    for row in y:
        np.testing.assert_array_equal(row, FP8_VALUES.astype(np.float32))


@pytest.mark.parametrize("format", FORMATS)
def test_nan_goes_where_it_belongs_and_nowhere_else(isa: str, format: str) -> None:
    shape = Shape("nan", 21, 200)
    nan = {"f32": np.float32(np.nan), "bf16": np.uint16(0x7FC1), "fp8_block": NAN_CODES[1]}[format]
    content = np.array(case(shape, format).data)
    content[13, 150] = nan
    weight = make_weight(shape, format, content, case(shape, format).scale)
    for compute in COMPUTES:
        for kernel in KERNELS:
            run = getattr(_native, kernel)
            lane = 150 if kernel == "gemv_transposed" else 13
            x = activations((4, num_inputs(weight, kernel)), "normal", 3)
            y = run(weight.view, x, compute)
            assert np.isnan(y[:, lane]).all()
            assert np.isfinite(np.delete(y, lane, 1)).all()
            x[2, 5] = np.nan
            y = run(case(shape, format).view, x, compute)
            assert np.isnan(y[2]).all(), f"{kernel} {compute}: NaN in x is lost"
            assert np.isfinite(np.delete(y, 2, 0)).all()
