"""A kernel's product of a random weight against float64."""

from __future__ import annotations

from functools import cache

import numpy as np
from reference import Variant, Weight, activations, product, random_weight, takes_fixed_point
from shapes import Shape
from tolerances import COSINE_DISTANCE, product_bound

# Kinds of weights and of activations that are hard together.
DIFFICULT = [
    ("normal", "small"),
    ("heavy", "heavy"),
    ("spike", "normal"),
    ("normal", "spike"),
    ("normal", "zeros"),
    ("subnormal", "small"),
]


@cache
def case(shape: Shape, variant: Variant, kind: str = "normal") -> Weight:
    return random_weight(shape, variant, seed=17, kind=kind)


def num_inputs(weight: Weight, kernel: str) -> int:
    return weight.shape.rows if kernel == "gemv_transposed" else weight.shape.cols


@cache
def expected(
    shape: Shape, variant: Variant, kernel: str, compute: str, num_rows: int, kinds=(), fixed=False
):
    weight_kind, x_kind = kinds or ("normal", "normal")
    weight = case(shape, variant, weight_kind)
    x = activations((num_rows, num_inputs(weight, kernel)), x_kind, seed=num_rows)
    return weight, x, *product(weight, x, compute, kernel == "gemv_transposed", fixed)


def check(
    shape: Shape, variant: Variant, kernel: str, compute: str, num_rows: int, kinds=()
) -> None:
    fixed = takes_fixed_point(case(shape, variant), kernel, num_rows)
    weight, x, wanted, magnitude = expected(shape, variant, kernel, compute, num_rows, kinds, fixed)
    y = weight.run(kernel, x, compute)
    label = f"{variant} {kernel} {compute} {num_rows} rows {shape}"
    error = np.abs(y - wanted)
    bound = product_bound(variant.format, x.shape[1], magnitude)
    worst = np.unravel_index(np.argmax(error - bound), error.shape)
    assert (error <= bound).all(), f"{label}: {worst} is {y[worst]}, not {wanted[worst]}"
    lengths = np.linalg.norm(y.astype(np.float64)) * np.linalg.norm(wanted)
    if y.size > 1 and lengths > 0:
        distance = 1 - np.vdot(y.astype(np.float64), wanted) / lengths
        assert distance <= COSINE_DISTANCE, f"{label}: cosine distance {distance}"
