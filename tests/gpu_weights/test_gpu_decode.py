"""Decoders of stored bytes against the native definition of a weight, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from oracle_formats import to_bf16
from oracle_packings import fp8_channel, int4_packed
from oracles import oracle_folder
from stored_models import FOLDERS, bind, native_weights

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")
from moechat import _native  # noqa: E402
from moechat.gpu_weights.decode import decode  # noqa: E402
from moechat.gpu_weights.stored import Layout, StoredWeights  # noqa: E402

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
DTYPES = (torch.float32, torch.bfloat16)


def on_device(stored_bytes: np.ndarray | None) -> torch.Tensor | None:
    return None if stored_bytes is None else torch.from_numpy(stored_bytes.copy())[None]


def bits(matrix: torch.Tensor) -> np.ndarray:
    """Integers of the elements' bits; BF16 and float32."""
    matrix = matrix.contiguous()
    if matrix.dtype == torch.bfloat16:
        return matrix.view(torch.int16).numpy().view(np.uint16)
    return matrix.view(torch.int32).numpy().view(np.uint32)


def expected_bits(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    values = np.ascontiguousarray(values, np.float32)
    return to_bf16(values) if dtype == torch.bfloat16 else values.view(np.uint32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FOLDERS)
def test_every_matrix_of_a_folder_is_the_native_one(name: str, dtype: torch.dtype) -> None:
    folder = oracle_folder(name)
    weights, native = StoredWeights.of(bind(folder)[1]), native_weights(folder)
    for role, half in weights.roles.items():
        stored = weights.matrices[half.key]
        data = on_device(stored.data)
        assert data is not None
        matrix = decode(stored.layout, data, on_device(stored.scale), dtype)[0]
        assert half.first is None
        assert (bits(matrix) == expected_bits(native[role], dtype)).all(), role
    for layer, stack in weights.experts.items():
        for part, matrices in stack.parts.items():
            for number, stored in enumerate(matrices):
                data = on_device(stored.data)
                assert data is not None
                matrix = decode(stored.layout, data, on_device(stored.scale), dtype)[0]
                prefix = f"layers.{layer}.experts.{number}."
                if part == "gate_up":
                    pairs = [("gate", matrix[0::2]), ("up", matrix[1::2])]
                else:
                    pairs = [(part, matrix)]
                for role, rows in pairs:
                    expected = expected_bits(native[prefix + role], dtype)
                    assert (bits(rows) == expected).all(), prefix + role
        for which, biases in stack.biases.items():
            for number, bias in enumerate(biases):
                assert (bias == native[f"layers.{layer}.experts.{number}.{which}_bias"]).all()
    roles = set(weights.roles) | set(weights.vectors)
    assert roles == {role for role in native if ".experts." not in role}
    assert all((weights.vectors[role] == native[role]).all() for role in weights.vectors)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows,cols,block", [(5, 64, (1, 32)), (200, 320, (128, 128)),
                                             (128, 256, (128, 128)), (7, 96, (7, 96)),
                                             (130, 40, (1, 40))])  # fmt: skip
def test_fp8_of_any_block_nan_codes_included(
    rows: int, cols: int, block: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    random = np.random.default_rng(rows)
    codes = random.integers(0, 256, (2, rows, cols), np.uint8)
    codes[:, -1, -2:] = 0x7F, 0xFF
    grid = (-(-rows // block[0]), -(-cols // block[1]))
    scale = random.standard_normal((2, *grid)).astype(np.float32)
    layout = Layout("fp8", rows, cols, block, grid, "F32")
    found = decode(
        layout,
        torch.from_numpy(codes).view(2, -1).to(device),
        torch.from_numpy(scale).view(torch.uint8).view(2, -1).to(device),
        dtype,
    ).cpu()
    for number in range(2):
        view = _native.MatrixView(
            "fp8", codes[number], scale=scale[number], block=block, scale_type="f32"
        )
        native = np.stack([_native.decode_row(view, row) for row in range(rows)])
        nan = (codes[number] & 0x7F) == 0x7F
        assert (torch.isnan(found[number]).numpy() == nan).all()
        same = bits(found[number]) == expected_bits(np.where(nan, 0, native), dtype)
        assert (same | nan).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group,cols", [(32, 128), (64, 64), (128, 320)])
def test_int4_is_what_the_packing_stands_for(group: int, cols: int, dtype: torch.dtype) -> None:
    cols_of_groups = -(-cols // group) * group
    weight = np.random.default_rng(group).standard_normal((6, cols_of_groups)).astype(np.float32)
    parts, _ = int4_packed(weight, group, "I64")
    words, scale = parts[".weight_packed"].array[:, : cols // 8], parts[".weight_scale"].array
    view = _native.MatrixView(
        "int4", np.ascontiguousarray(words), scale=scale, block=(1, group), scale_type="bf16",
        cols=cols,
    )  # fmt: skip
    native = np.stack([_native.decode_row(view, row) for row in range(6)])
    layout = Layout("int4", 6, cols, (1, group), scale.shape, "BF16")
    raw = torch.from_numpy(np.ascontiguousarray(words).view(np.uint8)).view(1, -1)
    found = decode(layout, raw, torch.from_numpy(scale.view(np.uint8)).view(1, -1), dtype)
    assert (bits(found[0]) == expected_bits(native, dtype)).all()


@pytest.mark.parametrize("scale_dtype", ["BF16", "F32"])
def test_fp8_with_a_scale_a_row(scale_dtype: str) -> None:
    weight = np.random.default_rng(1).standard_normal((9, 32)).astype(np.float32)
    parts, values = fp8_channel(weight, scale_dtype)
    codes, scale = parts[".weight"].array, parts[".weight_scale"].array
    layout = Layout("fp8", 9, 32, (1, 32), (9, 1), scale_dtype)
    found = decode(
        layout,
        torch.from_numpy(codes).view(1, -1),
        torch.from_numpy(scale.view(np.uint8)).view(1, -1),
        torch.float32,
    )
    assert (bits(found[0]) == expected_bits(values, torch.float32)).all()


def test_every_e8m0_scale() -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(256, 1)
    blocks = np.full((256, 16), 0x21, np.uint8)  # 0.5 and 1
    view = _native.MatrixView("mxfp4", blocks, scale=codes, block=(1, 32), scale_type="e8m0")
    native = np.stack([_native.decode_row(view, row) for row in range(256)])
    layout = Layout("mxfp4", 256, 32, (1, 32), (256, 1), "U8")
    found = decode(
        layout, torch.from_numpy(blocks).view(1, -1), torch.from_numpy(codes).view(1, -1),
        torch.float32,
    )[0]  # fmt: skip
    assert np.isnan(found[255].numpy()).all()
    assert (bits(found[:255]) == native[:255].view(np.uint32)).all()
