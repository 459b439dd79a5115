"""What must hold to the bit: rows alone or together, split ranges, and what is left untouched."""

from __future__ import annotations

import numpy as np
import pytest
from reference import FORMATS, activations, random_weight
from shapes import BITWISE_SHAPES, Shape

from moechat import _native

COMPUTES = ("bf16", "exact")
BY_SHAPE = pytest.mark.parametrize("shape", BITWISE_SHAPES, ids=lambda shape: shape.name)
BY_FORMAT = pytest.mark.parametrize("format", FORMATS)
DECODE_KERNELS = ("gemv", "gemv_transposed")


def inputs_and_outputs(shape: Shape, kernel: str) -> tuple[int, int]:
    transposed = kernel == "gemv_transposed"
    return (shape.rows, shape.cols) if transposed else (shape.cols, shape.rows)


def assert_same_bits(a: np.ndarray, b: np.ndarray, label: str) -> None:
    assert a.tobytes() == b.tobytes(), label


@BY_FORMAT
@BY_SHAPE
def test_a_row_does_not_know_its_neighbours(isa: str, shape: Shape, format: str) -> None:
    weight = random_weight(shape, format, 5)
    for kernel in DECODE_KERNELS:
        run = getattr(_native, kernel)
        x = activations((16, inputs_and_outputs(shape, kernel)[0]), "normal", 6)
        for compute in COMPUTES:
            alone = np.concatenate([run(weight.view, x[r : r + 1], compute) for r in range(16)])
            for count in range(2, 17):
                together = run(weight.view, x[:count], compute)
                assert_same_bits(together, alone[:count], f"{kernel} {compute} {count} rows")
            shuffled = run(weight.view, np.ascontiguousarray(x[::-1]), compute)
            assert_same_bits(shuffled[::-1].copy(), alone, f"{kernel} {compute} reversed")
            other = x.copy()
            other[1:] = np.nan
            first = run(weight.view, other, compute)[:1]
            assert_same_bits(first, alone[:1], f"{kernel} {compute} beside NaN")


@BY_FORMAT
@BY_SHAPE
def test_splitting_the_range_changes_nothing(isa: str, shape: Shape, format: str) -> None:
    weight = random_weight(shape, format, 7)
    for kernel in DECODE_KERNELS:
        run = getattr(_native, kernel)
        num_inputs, num_outputs = inputs_and_outputs(shape, kernel)
        for compute in COMPUTES:
            for num_rows in (1, 9):
                x = activations((num_rows, num_inputs), "normal", 8)
                whole = run(weight.view, x, compute)
                for step in (1, 5, 16, 32):
                    if num_outputs / step > 300:
                        continue
                    pieces = np.full_like(whole, np.nan)
                    for begin in range(0, num_outputs, step):
                        end = min(begin + step, num_outputs)
                        run(weight.view, x, compute, begin, end, pieces)
                    assert_same_bits(pieces, whole, f"{kernel} {compute} steps of {step}")


@BY_FORMAT
@BY_SHAPE
def test_a_slice_of_a_view_is_that_part_of_the_product(isa: str, shape: Shape, format: str) -> None:
    weight = random_weight(shape, format, 9)
    x = activations((2, shape.cols), "normal", 10)
    begin, count = shape.rows // 3, shape.rows // 2
    for compute in COMPUTES:
        whole = _native.gemv(weight.view, x, compute)[:, begin : begin + count]
        part = _native.gemv(weight.view.row_slice(begin, count), x, compute)
        assert_same_bits(part, whole.copy(), compute)
        across = _native.gemv_transposed(weight.view, x[:, :1].repeat(shape.rows, 1), compute)
        begin_col, cols = shape.cols // 3, shape.cols // 2
        part = _native.gemv_transposed(
            weight.view.col_slice(begin_col, cols), x[:, :1].repeat(shape.rows, 1), compute
        )
        assert_same_bits(part, across[:, begin_col : begin_col + cols].copy(), compute)


@BY_FORMAT
@pytest.mark.parametrize("kernel", [*DECODE_KERNELS, "gemm"])
def test_only_the_range_is_written_and_inputs_are_left_alone(
    isa: str, kernel: str, format: str
) -> None:
    shape = Shape("canaries", 45, 139, row_origin=100, col_origin=57, gap=3)
    weight = random_weight(shape, format, 11)
    run = getattr(_native, kernel)
    num_inputs, num_outputs = inputs_and_outputs(shape, kernel)
    data = weight.data.tobytes()
    scale = None if weight.scale is None else weight.scale.tobytes()
    for compute in COMPUTES:
        for num_rows in (1, 7):
            x = activations((num_rows, num_inputs), "normal", 12)
            x_before = x.tobytes()
            whole = run(weight.view, x, compute)
            assert_same_bits(run(weight.view, x, compute), whole, "run twice")
            room = np.full((num_rows, num_outputs + 6), 1e30, np.float32)
            for begin, end in [
                (0, num_outputs),
                (3, 4),
                (5, 22),
                (num_outputs - 1, num_outputs),
                (8, 8),
            ]:
                room[:] = 1e30
                run(weight.view, x, compute, begin, end, room[:, 3:-3])
                written = room[:, 3:-3][:, begin:end]
                np.testing.assert_allclose(written, whole[:, begin:end], rtol=1e-4, atol=1e-5)
                written[:] = 1e30
                assert (room == 1e30).all(), f"wrote outside [{begin}, {end})"
            assert x.tobytes() == x_before
    assert weight.data.tobytes() == data
    assert weight.scale is None or weight.scale.tobytes() == scale
