"""Decode products that take activations in 16-bit fixed point (matmul.h): the edges of it."""

from __future__ import annotations

import numpy as np
import pytest
from products import case, num_inputs
from reference import Variant, activations, product, rounded_inputs, takes_fixed_point
from shapes import Shape
from tolerances import product_bound

FIXED = [Variant("int4", "bf16", (1, 32)), Variant("mxfp4", "e8m0", (1, 32)), Variant("q4_0"),
         Variant("q4_k"), Variant("q5_k"), Variant("q6_k"), Variant("mxfp4_block")]  # fmt: skip


@pytest.mark.parametrize("variant", FIXED, ids=str)
@pytest.mark.parametrize("size", [1e-36, 1e-30, 1e30])
def test_inputs_of_extreme_sizes(isa: str, variant: Variant, size: float) -> None:
    weight = case(Shape("sizes", 9, 520), variant)
    x = activations((2, num_inputs(weight, "gemv")), "normal", 5) * np.float32(size)
    fixed = takes_fixed_point(weight, "gemv", 2)
    wanted, magnitude = product(weight, x, "bf16", fixed=fixed)
    bound = product_bound(variant.format, x.shape[1], magnitude)
    assert (np.abs(weight.run("gemv", x, "bf16") - wanted) <= bound).all()


@pytest.mark.parametrize("variant", FIXED, ids=str)
@pytest.mark.parametrize("value", [np.inf, -np.inf, 1e34, np.nan])
def test_what_is_not_finite_stays_so(isa: str, variant: Variant, value: float) -> None:
    weight = case(Shape("sizes", 9, 520), variant)
    x = activations((3, num_inputs(weight, "gemv")), "normal", 5)
    x[1, 300] = np.float32(value)
    y = weight.run("gemv", x, "bf16")
    if np.isfinite(value):
        y = y[1] / np.float32(value)  # the other terms do not count
        np.testing.assert_allclose(y, weight.values[:, 300], rtol=0.01, atol=1e-6)
    else:
        assert not np.isfinite(y[1]).any()
        assert np.isfinite(y[[0, 2]]).all()


@pytest.mark.parametrize("kind", ["normal", "small", "heavy", "spike"])
def test_the_second_rounding_adds_little_to_the_first(kind: str) -> None:
    x = activations((16, 1024), kind, 11)
    first = np.linalg.norm(rounded_inputs(x, "bf16") - x)
    both = np.linalg.norm(rounded_inputs(x, "bf16", fixed=True) - x)
    assert first < both <= 1.05 * first


@pytest.mark.parametrize("outlier", [0.0, 128.0, 1000.0, 2.0**20])
def test_the_second_rounding_beside_a_column_that_the_first_keeps(outlier: float) -> None:
    x = activations((16, 256), "normal", 11)
    if outlier:
        x[:, 100] = outlier
    first = rounded_inputs(x, "bf16")
    second = np.linalg.norm(rounded_inputs(x, "bf16", fixed=True) - first, axis=1)
    assert (second <= 2.0**-11 * np.linalg.norm(first, axis=1)).all()
    if not outlier:
        assert (second <= 0.01 * np.linalg.norm(first - x, axis=1)).all()
