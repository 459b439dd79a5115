"""What must hold to the bit: rows alone or together, split ranges, and what is left untouched."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from reference import BF16, F32, FP8, VARIANTS, Variant, activations, random_weight, units
from shapes import BITWISE_SHAPES, Shape

COMPUTES = ("bf16", "exact")
PLAIN = (F32, BF16, FP8)
CASES = pytest.mark.parametrize(
    ("shape", "variant"),
    [
        pytest.param(shape, variant, id=f"{shape.name}-{variant}")
        for variant in VARIANTS
        for shape in (BITWISE_SHAPES if variant in PLAIN else BITWISE_SHAPES[1:3])
    ],
)
BY_VARIANT = pytest.mark.parametrize("variant", VARIANTS, ids=str)
DECODE_KERNELS = ("gemv", "gemv_transposed")


def inputs_and_outputs(shape: Shape, kernel: str) -> tuple[int, int]:
    transposed = kernel == "gemv_transposed"
    return (shape.rows, shape.cols) if transposed else (shape.cols, shape.rows)


def assert_same_bits(a: np.ndarray, b: np.ndarray, label: str) -> None:
    assert a.tobytes() == b.tobytes(), label


@CASES
def test_a_row_does_not_know_its_neighbours(isa: str, shape: Shape, variant: Variant) -> None:
    weight = random_weight(shape, variant, 5)
    for kernel in DECODE_KERNELS:
        x = activations((16, inputs_and_outputs(weight.shape, kernel)[0]), "normal", 6)
        for compute in COMPUTES:
            alone = np.concatenate([weight.run(kernel, x[r : r + 1], compute) for r in range(16)])
            for count in range(2, 17):
                together = weight.run(kernel, x[:count], compute)
                assert_same_bits(together, alone[:count], f"{kernel} {compute} {count} rows")
            shuffled = weight.run(kernel, np.ascontiguousarray(x[::-1]), compute)
            assert_same_bits(shuffled[::-1].copy(), alone, f"{kernel} {compute} reversed")
            other = x.copy()
            other[1:] = np.nan
            first = weight.run(kernel, other, compute)[:1]
            assert_same_bits(first, alone[:1], f"{kernel} {compute} beside NaN")


# Magnitudes whose sums are denormal, and whose denormal parts a processor may flush or keep.
TINY = np.array([2.0**-e for e in range(100, 127)] + [2.0**-130, 0], np.float32)
HUGE = np.array([np.inf, -np.inf, np.nan, 3e38, -3e38, 1e30, 0, 1], np.float32)


@BY_VARIANT
@pytest.mark.parametrize("magnitudes", [TINY, HUGE], ids=["tiny", "huge"])
def test_hard_rows_do_not_know_their_neighbours(
    isa: str, variant: Variant, magnitudes: np.ndarray
) -> None:
    generator = np.random.default_rng(13)
    for kind in ("heavy", "subnormal"):
        weight = random_weight(Shape("hard", 21, 392), variant, 14, kind)
        for kernel in DECODE_KERNELS:
            size = (16, inputs_and_outputs(weight.shape, kernel)[0])
            x = activations(size, "normal", 15)
            hard = generator.random(size) < (1 if magnitudes is TINY else 0.01)
            with np.errstate(all="ignore"):
                x[hard] *= generator.choice(magnitudes, size)[hard]
            alone = np.concatenate([weight.run(kernel, x[r : r + 1], "bf16") for r in range(16)])
            alone[np.isnan(alone)] = np.nan  # one NaN is as good as another
            for count in (2, 3, 4, 16):
                together = weight.run(kernel, x[:count], "bf16")
                together[np.isnan(together)] = np.nan
                assert_same_bits(together, alone[:count], f"{kernel} {kind} {count} rows")


@CASES
def test_splitting_the_range_changes_nothing(isa: str, shape: Shape, variant: Variant) -> None:
    weight = random_weight(shape, variant, 7)
    for kernel in DECODE_KERNELS:
        num_inputs, num_outputs = inputs_and_outputs(weight.shape, kernel)
        for compute in COMPUTES:
            for num_rows in (1, 9):
                x = activations((num_rows, num_inputs), "normal", 8)
                whole = weight.run(kernel, x, compute)
                for step in (1, 5, 16, 32):
                    if num_outputs / step > 300:
                        continue
                    pieces = np.full_like(whole, np.nan)
                    for begin in range(0, num_outputs, step):
                        end = min(begin + step, num_outputs)
                        weight.run(kernel, x, compute, begin, end, pieces)
                    assert_same_bits(pieces, whole, f"{kernel} {compute} steps of {step}")


@CASES
def test_a_slice_of_a_view_is_that_part_of_the_product(
    isa: str, shape: Shape, variant: Variant
) -> None:
    weight = random_weight(shape, variant, 9)
    unit, row_unit = units(variant)
    rows, cols = weight.values.shape
    begin, count = rows // 3 // row_unit * row_unit, rows // 2 // row_unit * row_unit
    begin_col, count_col = cols // 3 // unit * unit, cols // 2 // unit * unit
    for compute in COMPUTES:
        x = activations((2, cols), "normal", 10)
        whole = weight.run("gemv", x, compute)[:, begin : begin + count]
        part = replace(weight, view=weight.view.row_slice(begin, count)).run("gemv", x, compute)
        assert_same_bits(part, whole.copy(), compute)
        if count_col == 0:  # one block a row
            continue
        x = activations((2, rows), "normal", 11)
        whole = weight.run("gemv_transposed", x, compute)[:, begin_col : begin_col + count_col]
        view = weight.view.col_slice(begin_col, count_col)
        part = replace(weight, view=view).run("gemv_transposed", x, compute)
        assert_same_bits(part, whole.copy(), compute)


@BY_VARIANT
def test_only_the_range_is_written_and_inputs_are_left_alone(isa: str, variant: Variant) -> None:
    for kernel in (*DECODE_KERNELS, "gemm"):
        check_range(kernel, variant)


def check_range(kernel: str, variant: Variant) -> None:
    shape = Shape("canaries", 45, 139, row_origin=100, col_origin=57, gap=3)
    weight = random_weight(shape, variant, 11)
    num_inputs, num_outputs = inputs_and_outputs(weight.shape, kernel)
    data = weight.data.tobytes()
    scale = None if weight.scale is None else weight.scale.tobytes()
    for compute in COMPUTES:
        for num_rows in (1, 7):
            x = activations((num_rows, num_inputs), "normal", 12)
            x_before = x.tobytes()
            whole = weight.run(kernel, x, compute)
            assert_same_bits(weight.run(kernel, x, compute), whole, "run twice")
            room = np.full((num_rows, num_outputs + 6), 1e30, np.float32)
            for begin, end in [
                (0, num_outputs),
                (3, 4),
                (5, 22),
                (num_outputs - 1, num_outputs),
                (8, 8),
            ]:
                room[:] = 1e30
                weight.run(kernel, x, compute, begin, end, room[:, 3:-3])
                written = room[:, 3:-3][:, begin:end]
                np.testing.assert_allclose(written, whole[:, begin:end], rtol=1e-4, atol=1e-5)
                written[:] = 1e30
                assert (room == 1e30).all(), f"wrote outside [{begin}, {end})"
            assert x.tobytes() == x_before
    assert weight.data.tobytes() == data
    assert weight.scale is None or weight.scale.tobytes() == scale
