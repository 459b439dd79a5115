"""MatrixView and the product bindings refuse every wrong shape, dtype and bound."""

from __future__ import annotations

import gc
import mmap
import weakref

import numpy as np
import pytest

from moechat import _native

CODES = np.zeros((200, 300), np.uint8)
SCALE = np.ones((2, 3), np.float32)


def refused(action, *words: str) -> None:
    with pytest.raises(_native.NativeError) as caught:
        action()
    name, message = caught.value.args
    assert name == "bad-argument"
    for word in words:
        assert word in message, message


def test_shape_and_format_are_reported() -> None:
    view = _native.MatrixView("fp8_block", CODES, SCALE)
    assert (view.rows, view.cols, view.format) == (200, 300, "fp8_block")
    part = view.row_slice(150, 50).col_slice(299, 1)
    assert (part.rows, part.cols) == (50, 1)


@pytest.mark.parametrize("format", ["", "fp8", "F32", "bf16\0"])
def test_unknown_format(format: str) -> None:
    refused(lambda: _native.MatrixView(format, CODES), "'f32', 'bf16' or 'fp8_block'")


@pytest.mark.parametrize(
    ("format", "dtype"),
    [
        ("f32", "float64"), ("f32", "uint32"), ("f32", ">f4"), ("f32", "uint16"),
        ("bf16", "float16"), ("bf16", "int16"), ("bf16", ">u2"), ("bf16", "uint8"),
        ("fp8_block", "int8"), ("fp8_block", "bool"), ("fp8_block", "uint16"), ("fp8_block", "S1"),
    ],
)  # fmt: skip
def test_wrong_element_type(format: str, dtype: str) -> None:
    scale = SCALE if format == "fp8_block" else None
    refused(lambda: _native.MatrixView(format, np.zeros((2, 2), dtype), scale), "element type")


@pytest.mark.parametrize("shape", [(), (4,), (2, 2, 2)])
def test_wrong_number_of_dimensions(shape: tuple[int, ...]) -> None:
    refused(lambda: _native.MatrixView("f32", np.zeros(shape, np.float32)), "two dimensions")


@pytest.mark.parametrize(
    ("shape", "words"), [((0, 5), "one row"), ((5, 0), "columns"), ((1, 32769), "32768")]
)
def test_sizes_out_of_bounds(shape: tuple[int, int], words: str) -> None:
    refused(lambda: _native.MatrixView("f32", np.zeros(shape, np.float32)), words)


def test_the_widest_matrix_is_taken() -> None:
    x = np.zeros((1, 32768), np.float32)
    assert _native.MatrixView("f32", x).cols == 32768
    x[0, -1] = 2
    assert _native.gemv(_native.MatrixView("f32", x), x, "exact").tolist() == [[4.0]]


@pytest.mark.parametrize(
    "data",
    [CODES.T, CODES[:, ::2], CODES[:, ::-1], CODES[::-1], np.broadcast_to(CODES[0], (9, 300))],
    ids=["transposed", "every second column", "columns backward", "rows backward", "broadcast"],
)
def test_rows_must_be_contiguous_and_apart(data: np.ndarray) -> None:
    scale = np.ones((9, 9), np.float32)
    refused(lambda: _native.MatrixView("fp8_block", data, scale), "rows of data")


@pytest.mark.parametrize("format", ["f32", "bf16"])
def test_only_fp8_has_scales(format: str) -> None:
    data = np.zeros((4, 4), {"f32": np.float32, "bf16": np.uint16}[format])
    refused(lambda: _native.MatrixView(format, data, SCALE), "only fp8_block")


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (None, "needs a scale"),
        ([[1.0] * 3] * 2, "needs a scale array"),
        (SCALE.astype(np.float64), "float32"),
        (SCALE.astype(">f4"), "float32"),
        (SCALE[0], "2-D"),
        (SCALE[:1], "2 x 3 entries"),
        (SCALE[:, :2], "2 x 3 entries"),
        (np.ones((3, 2), np.float32).T, "C-contiguous"),
        (np.ones((4, 3), np.float32)[::2], "C-contiguous"),
        (SCALE[::-1], "C-contiguous"),
        (np.broadcast_to(SCALE[0], (2, 3)), "C-contiguous"),
    ],
)
def test_wrong_scale(scale: object, words: str) -> None:
    refused(lambda: _native.MatrixView("fp8_block", CODES, scale), words)


@pytest.mark.parametrize(
    "block", [(0, 128), (128, 0), (-1, 128), (2**31, 128), (128,), (128, 128, 128)]
)
def test_wrong_block(block: tuple[int, ...]) -> None:
    refused(lambda: _native.MatrixView("fp8_block", CODES, SCALE, block), "block")


def test_the_grid_must_cover_the_origin_too() -> None:
    def view(row_origin: int, col_origin: int) -> _native.MatrixView:
        return _native.MatrixView("fp8_block", CODES, SCALE, (128, 128), row_origin, col_origin)

    assert view(56, 84).rows == 200
    refused(lambda: view(57, 0), "3 x 3 entries")
    refused(lambda: view(0, 85), "2 x 4 entries")
    for origins in [(-1, 0), (0, -1), (2**62, 0), (0, 2**62)]:
        refused(lambda origins=origins: view(*origins), "origin")


@pytest.mark.parametrize(
    ("begin", "count"),
    [(-1, 2), (0, 0), (0, -1), (0, 201), (200, 1), (2**62, 2**62), (1, 2**63 - 1)],
)
def test_slices_out_of_range(begin: int, count: int) -> None:
    view = _native.MatrixView("fp8_block", CODES[:, :200], SCALE)
    refused(lambda: view.row_slice(begin, count), "rows out of range")
    refused(lambda: view.col_slice(begin, count), "columns out of range")


def test_arrays_live_as_long_as_a_slice_of_the_view() -> None:
    class Owned(np.ndarray):
        pass

    data = np.full((2, 4), 3, np.float32).view(Owned)
    alive = weakref.ref(data)
    part = _native.MatrixView("f32", data).row_slice(1, 1)
    del data
    gc.collect()
    assert alive() is not None
    assert _native.gemv(part, np.ones((1, 4), np.float32), "exact")[0, 0] == 12
    del part
    gc.collect()
    assert alive() is None


def test_a_read_only_unaligned_mapping_is_used_in_place() -> None:
    mapping = mmap.mmap(-1, 4096)
    mapping[:] = b"\xff" * 4096
    mapping[3 : 3 + 24] = np.arange(6, dtype=np.float32).tobytes()
    content = np.frombuffer(mapping, np.uint8)
    content.flags.writeable = False
    data = np.ndarray((2, 3), np.float32, content, offset=3)
    view = _native.MatrixView("f32", data)
    x = np.ones((1, 3), np.float32)
    assert _native.gemv(view, x, "exact").tolist() == [[3.0, 12.0]]
    mapping[3 : 3 + 4] = np.float32(10).tobytes()
    assert _native.gemv(view, x, "exact").tolist() == [[13.0, 12.0]]  # no copy was made


@pytest.mark.parametrize("kernel", ["gemv", "gemm", "gemv_transposed"])
def test_products_refuse_what_does_not_fit(kernel: str) -> None:
    run = getattr(_native, kernel)
    view = _native.MatrixView("f32", np.zeros((8, 8), np.float32))
    x = np.zeros((2, 8), np.float32)
    refused(lambda: run(view, x, "fp16"), "'bf16' or 'exact'")
    for wrong in [
        x[:, :7], x[0], x[:0], x.astype(np.float64), x.T.copy().T, x[None], x.astype(">f4"),
        np.ndarray((1, 8), np.float32, np.zeros(40, np.uint8), offset=1),
    ]:  # fmt: skip
        refused(lambda wrong=wrong: run(view, wrong, "exact"), "x must be float32")
    for begin, end in [(-1, 8), (0, 9), (5, 4), (9, 9), (0, -2)]:
        refused(lambda begin=begin, end=end: run(view, x, "exact", begin, end), "begin and end")
    read_only = np.zeros((2, 8), np.float32)
    read_only.flags.writeable = False
    for out in [x[:1], x[:, :7], x.astype(np.float64), read_only, [[0.0] * 8] * 2]:
        refused(lambda out=out: run(view, x, "exact", 0, 8, out), "out")


def test_gemv_refuses_a_seventeenth_row() -> None:
    view = _native.MatrixView("f32", np.zeros((8, 8), np.float32))
    refused(lambda: _native.gemv(view, np.zeros((17, 8), np.float32), "exact"), "16 rows")


def test_what_was_not_asked_for_is_nan() -> None:
    view = _native.MatrixView("f32", np.zeros((4, 8), np.float32))
    y = _native.gemv(view, np.zeros((1, 8), np.float32), "exact", 1, 3)
    assert np.isnan(y).tolist() == [[True, False, False, True]]
