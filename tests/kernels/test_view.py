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
    view = _native.MatrixView("fp8", CODES, SCALE)
    assert (view.rows, view.cols, view.format) == (200, 300, "fp8")
    part = view.row_slice(150, 50).col_slice(299, 1)
    assert (part.rows, part.cols) == (50, 1)


@pytest.mark.parametrize("format", ["", "fp8_block", "F32", "bf16\0"])
def test_unknown_format(format: str) -> None:
    refused(
        lambda: _native.MatrixView(format, CODES),
        "f32, f16, bf16, fp8, mxfp4, int4, awq, gptq, q8_0",
    )


@pytest.mark.parametrize(
    ("format", "dtype"),
    [
        ("f32", "float64"), ("f32", "uint32"), ("f32", ">f4"), ("f32", "uint16"),
        ("bf16", "float16"), ("bf16", "int16"), ("bf16", ">u2"), ("bf16", "uint8"),
        ("fp8", "int8"), ("fp8", "bool"), ("fp8", "uint16"), ("fp8", "S1"),
        ("f16", "float16"), ("mxfp4", "int8"), ("int4", "uint32"), ("int4", ">i4"),
        ("q4_k", "int8"),
    ],
)  # fmt: skip
def test_wrong_element_type(format: str, dtype: str) -> None:
    scale = SCALE if format == "fp8" else None
    refused(lambda: _native.MatrixView(format, np.zeros((2, 2), dtype), scale), "element type")


@pytest.mark.parametrize("shape", [(), (4,), (2, 2, 2)])
def test_wrong_number_of_dimensions(shape: tuple[int, ...]) -> None:
    refused(lambda: _native.MatrixView("f32", np.zeros(shape, np.float32)), "two dimensions")


@pytest.mark.parametrize(
    ("shape", "words"), [((0, 5), "one row"), ((5, 0), "columns"), ((1, 65537), "65536")]
)
def test_sizes_out_of_bounds(shape: tuple[int, int], words: str) -> None:
    refused(lambda: _native.MatrixView("f32", np.zeros(shape, np.float32)), words)


def test_the_widest_matrix_is_taken() -> None:
    x = np.zeros((1, 65536), np.float32)
    assert _native.MatrixView("f32", x).cols == 65536
    x[0, -1] = 2
    assert _native.gemv(_native.MatrixView("f32", x), x, "exact").tolist() == [[4.0]]


@pytest.mark.parametrize(
    "data",
    [CODES.T, CODES[:, ::2], CODES[:, ::-1], CODES[::-1], np.broadcast_to(CODES[0], (9, 300))],
    ids=["transposed", "every second column", "columns backward", "rows backward", "broadcast"],
)
def test_rows_must_be_contiguous_and_apart(data: np.ndarray) -> None:
    scale = np.ones((9, 9), np.float32)
    refused(lambda: _native.MatrixView("fp8", data, scale), "rows of data")


@pytest.mark.parametrize("format", ["f32", "f16", "bf16", "q8_0", "q6_k"])
def test_only_grids_have_scales(format: str) -> None:
    dtype = {"f32": np.float32, "q8_0": np.uint8, "q6_k": np.uint8}.get(format, np.uint16)
    data = np.zeros((4, 34 * 210), dtype)
    refused(lambda: _native.MatrixView(format, data, SCALE), format, "no scale")
    refused(lambda: _native.MatrixView(format, data, scale_type="f32"), format, "no scale")
    refused(lambda: _native.MatrixView(format, data, zeros=SCALE), format, "no scale")


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (None, "needs a scale"),
        ([[1.0] * 3] * 2, "needs a scale array"),
        (SCALE.astype(np.float64), "float32"),
        (SCALE.astype(">f4"), "float32"),
        (SCALE.astype(np.uint16), "scale_type"),
        (SCALE[0], "2-D"),
        (SCALE[:1], "2 x 3 entries"),
        (SCALE[:, :2], "2 x 3 entries"),
        (np.ones((3, 2), np.float32).T, "rows of scale"),
        (np.ones((2, 6), np.float32)[:, ::2], "rows of scale"),
        (SCALE[::-1], "rows of scale"),
        (np.broadcast_to(SCALE[0], (2, 3)), "rows of scale"),
    ],
)
def test_wrong_scale(scale: object, words: str) -> None:
    refused(lambda: _native.MatrixView("fp8", CODES, scale), "fp8", words)


@pytest.mark.parametrize(
    ("scale_type", "dtype"),
    [("f32", "uint16"), ("bf16", "float32"), ("f16", "uint8"), ("e8m0", "uint16")],
)
def test_scale_type_and_array_must_agree(scale_type: str, dtype: str) -> None:
    scale = SCALE.astype(dtype)
    refused(lambda: _native.MatrixView("fp8", CODES, scale, scale_type=scale_type), "scale_type")


def test_unknown_scale_type() -> None:
    words = "'f32', 'bf16', 'f16' or 'e8m0', not 'e5m2'"
    refused(lambda: _native.MatrixView("fp8", CODES, SCALE, scale_type="e5m2"), words)


def test_scale_rows_may_be_strided() -> None:
    wide = np.arange(18, dtype=np.float32).reshape(6, 3)
    codes = np.full((200, 300), 0x38, np.uint8)  # 1.0
    view = _native.MatrixView("fp8", codes, wide[1::2][:2])
    assert _native.decode_row(view, 199)[[0, 128, 299]].tolist() == [9.0, 10.0, 11.0]


def test_stacked_experts_and_interleaved_rows() -> None:
    """gpt-oss: gate and up rows take turns, experts stand one behind the other."""
    data = np.zeros((3, 8, 32), np.uint8)
    data[2, 5] = 0x42  # 1.0 and 2.0
    scale = np.full((3, 8, 2), 127, np.uint8)
    scale[2, 5, 1] = 130
    up = _native.MatrixView("mxfp4", data[2, 1::2], scale[2, 1::2], (1, 32))
    assert (up.rows, up.cols) == (4, 64)
    assert _native.decode_row(up, 2)[[0, 1, 62, 63]].tolist() == [1.0, 2.0, 8.0, 16.0]
    assert not _native.decode_row(up, 1).any()


@pytest.mark.parametrize(
    "block", [(0, 128), (128, 0), (-1, 128), (2**31, 128), (128,), (128, 128, 128)]
)
def test_wrong_block(block: tuple[int, ...]) -> None:
    refused(lambda: _native.MatrixView("fp8", CODES, SCALE, block), "block")


def test_the_grid_must_cover_the_origin_too() -> None:
    def view(row_origin: int, col_origin: int) -> _native.MatrixView:
        return _native.MatrixView("fp8", CODES, SCALE, (128, 128), row_origin, col_origin)

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
    view = _native.MatrixView("fp8", CODES[:, :200], SCALE)
    refused(lambda: view.row_slice(begin, count), "rows out of range")
    refused(lambda: view.col_slice(begin, count), "columns out of range")


@pytest.mark.parametrize(
    ("format", "width", "cols"), [("int4", 5, 40), ("mxfp4", 20, 40), ("q8_0", 68, 64)]
)
def test_columns_that_the_packing_tells(format: str, width: int, cols: int) -> None:
    data = np.zeros((3, width), np.int32 if format == "int4" else np.uint8)
    scale = None if format == "q8_0" else np.ones((3, 2), np.float32)

    def view(**wanted: int) -> _native.MatrixView:
        return _native.MatrixView(format, data, scale, (1, 32), **wanted)

    assert view().cols == view(cols=cols).cols == cols
    for wrong in (0, -1, cols - 8, cols + 1, 2**40):
        refused(lambda wrong=wrong: view(cols=wrong), format, f"holds {cols} columns")
    if format == "int4":
        assert view(cols=33).cols == 33


def test_gguf_rows_are_whole_blocks() -> None:
    for format, bytes_ in [("q8_0", 33), ("q4_k", 143), ("q6_k", 420 + 1), ("mxfp4_block", 16)]:
        data = np.zeros((2, bytes_), np.uint8)
        refused(lambda data=data, format=format: _native.MatrixView(format, data), "multiple of")
    data = np.zeros((2, 420), np.uint8)
    assert _native.MatrixView("q6_k", data).cols == 512
    refused(lambda: _native.MatrixView("q6_k", data, col_origin=32), "col_origin")


@pytest.mark.parametrize(
    ("format", "block", "col_origin"),
    [("int4", (1, 4), 0), ("int4", (1, 32), 4), ("mxfp4", (1, 33), 0), ("mxfp4", (1, 32), 1)],
)
def test_blocks_end_between_packed_units(
    format: str, block: tuple[int, int], col_origin: int
) -> None:
    data = np.zeros((3, 40), np.int32 if format == "int4" else np.uint8)
    scale = np.ones((3, 200), np.float32)
    refused(
        lambda: _native.MatrixView(format, data, scale, block, 0, col_origin), format, "multiple of"
    )


WORDS = np.zeros((64, 4), np.int32)


def transposed(format: str, **wrong: object) -> _native.MatrixView:
    """64 inputs, 32 outputs, groups of 16 inputs."""
    arguments = {
        "data": WORDS if format == "awq" else np.zeros((8, 32), np.int32),
        "scale": np.zeros((4, 32), np.uint16),
        "block": (16, 1),
        "scale_type": "f16",
        "zeros": WORDS[:4],
        "transposed": True,
    }
    return _native.MatrixView(format, **{**arguments, **wrong})


@pytest.mark.parametrize("format", ["awq", "gptq"])
def test_awq_and_gptq(format: str) -> None:
    view = transposed(format)
    assert (view.rows, view.cols, view.inputs, view.outputs) == (64, 32, 64, 32)
    assert view.transposed and view.format == format
    refused(lambda: transposed(format, transposed=False), "transposed")
    refused(lambda: transposed(format, block=(16, 32)), "block is (rows, 1)")
    refused(lambda: transposed(format, zeros=None), "zeros")
    refused(lambda: transposed(format, zeros=WORDS[:3]), "zeros needs 4 x 4")
    refused(lambda: transposed(format, zeros=WORDS[:4, :3]), "zeros needs 4 x 4")
    refused(lambda: transposed(format, zeros=WORDS[:4].astype(np.uint32)), "zeros must be")
    refused(lambda: transposed(format, scale=np.zeros((3, 32), np.uint16)), "4 x 32")
    refused(lambda: transposed(format, scale=np.zeros((4, 31), np.uint16)), "4 x 32")
    refused(lambda: transposed(format, col_origin=4), "col_origin")
    refused(lambda: view.col_slice(4, 8), "multiples of 8")


def test_group_index() -> None:
    index = np.arange(64, dtype=np.int32) % 4
    transposed("gptq", group_index=index)
    refused(lambda: transposed("awq", group_index=index), "only gptq")
    for wrong in [index[:63], index.astype(np.int64), index[None], np.repeat(index, 2)[::2]]:
        refused(lambda wrong=wrong: transposed("gptq", group_index=wrong), "group_index must be")
    for outside in (-1, 4, 2**31 - 1):
        index[17] = outside
        refused(lambda: transposed("gptq", group_index=index), "row 17", str(outside))
    refused(lambda: transposed("gptq").row_slice(4, 8), "multiples of 8")


def test_every_second_column() -> None:
    both = np.arange(24, dtype=np.float32).reshape(3, 8)
    up = _native.MatrixView("f32", both[:, 1::2], transposed=True, col_step=2)
    assert (up.inputs, up.outputs) == (3, 4)
    y = _native.multiply(up, np.array([[1, 10, 100]], np.float32), "exact")
    assert y.tolist() == [[1 + 90 + 1700, 3 + 110 + 1900, 5 + 130 + 2100, 7 + 150 + 2300]]
    refused(lambda: _native.MatrixView("f32", both[:, ::2], col_step=2), "transposed")
    refused(lambda: _native.MatrixView("f32", both, transposed=True, col_step=2), "col_step")
    refused(lambda: _native.MatrixView("f32", both, transposed=True, col_step=3), "col_step")
    refused(
        lambda: _native.MatrixView("fp8", CODES, SCALE, transposed=True, col_step=2), "col_step"
    )


def test_products_follow_the_orientation() -> None:
    stored = np.arange(12, dtype=np.float32).reshape(3, 4)
    a, b = np.ones((1, 3), np.float32), np.ones((1, 4), np.float32)
    for transposed_ in (False, True):
        view = _native.MatrixView("f32", stored, transposed=transposed_)
        assert (view.outputs, view.inputs) == ((4, 3) if transposed_ else (3, 4))
        forward, back = (a, b) if transposed_ else (b, a)
        sums = {3: stored.sum(0), 4: stored.sum(1)}
        y = _native.multiply(view, forward, "exact")
        assert y[0].tolist() == sums[forward.shape[1]].tolist()
        y = _native.multiply_transposed(view, back, "exact")
        assert y[0].tolist() == sums[back.shape[1]].tolist()
        refused(lambda view=view, x=back: _native.multiply(view, x, "exact"), "x must be")
        refused(lambda view=view: _native.decode_row(view, 3), "row")
        refused(lambda view=view: _native.decode_row(view, -1), "row")
    for kernel in (_native.gemv, _native.gemm):
        refused(lambda kernel=kernel: kernel(view, b, "exact"), "multiply")


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


@pytest.mark.parametrize(
    "kernel", ["gemv", "gemm", "gemv_transposed", "multiply", "multiply_transposed"]
)
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
