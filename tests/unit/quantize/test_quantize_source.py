"""Every readable format, decoded by rows; every other one, refused by name."""

import os

import numpy as np
import pytest
from quantize_reference import (
    decode,
    fp8_block,
    fp8_channel,
    int4,
    mxfp4,
    normal,
    plain,
    write_checkpoint,
)

from moechat.errors import ArchitectureUnsupported, CheckpointDamaged
from moechat.quantize.decode import Reader
from moechat.quantize.source import check_method, read_layers
from moechat.weights.mapped import Checkpoint

NAME = "model.layers.0.mlp.down_proj.weight"
STORED = {
    "F32": {NAME: plain(normal(1, 70, 33), "F32")},
    "F16": {NAME: plain(normal(2, 70, 33), "F16")},
    "BF16": {NAME: plain(normal(3, 70, 33))},
    "one dimension": {NAME: plain(normal(4, 77))},
    "scalar": {NAME: plain(np.float32(3.5).reshape(()), "F32")},
    "FP8 blocks": fp8_block(NAME, 5, 300, 200),
    "FP8 one block": fp8_block(NAME, 6, 7, 5),
    "FP8 rows": fp8_channel(NAME, 7, 300, 200),
    "FP8 rows, float32": fp8_channel(NAME, 8, 9, 200, "F32"),
    "FP8 rows, flat": {
        NAME: fp8_channel(NAME, 12, 9, 200)[NAME],
        NAME + "_scale": plain(np.abs(normal(13, 9)) / 448),
    },
    "INT4": int4(NAME, 9, 70, 96),
    "INT4, group 8": int4(NAME, 10, 70, 96, group=8),
    "INT4, one group a row": int4(NAME, 11, 70, 96, group=96),
}


def only_layer(folder):
    (layer,) = read_layers(Checkpoint.open(folder))
    return layer


@pytest.mark.parametrize("tensors", STORED.values(), ids=STORED)
def test_rows_are_the_reference_s(tmp_path, tensors):
    folder = write_checkpoint(tmp_path, {**tensors})
    layer, values = only_layer(folder), decode(folder)[NAME]
    assert (layer.name, layer.shape) == (NAME, values.shape)
    assert layer.stored_bytes == sum(array.nbytes for _, array in tensors.values())
    reader = Reader()
    rows = values.reshape(layer.rows, layer.cols)
    spans = {(0, layer.rows), (0, 1), (layer.rows // 3, layer.rows), (layer.rows - 1, layer.rows)}
    for first, last in spans:
        got = reader.values(layer, first, last)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, rows[first:last], rtol=1e-6)
    reader.close()


def test_mxfp4_is_transposed(tmp_path):
    name = "model.layers.0.mlp.experts.gate_up_proj"
    folder = write_checkpoint(tmp_path, mxfp4(name, 1, experts=2, outputs=5, inputs=96))
    layer, values = only_layer(folder), decode(folder)[name]
    assert (layer.name, layer.shape, layer.rows, layer.cols) == (name, (2, 96, 5), 192, 5)
    reader, rows = Reader(), values.reshape(192, 5)
    for first, last in ((0, 96), (32, 64), (96, 128), (160, 192)):
        np.testing.assert_array_equal(reader.values(layer, first, last), rows[first:last])


def test_parts_may_lie_in_different_files(tmp_path):
    tensors = {**fp8_block(NAME, 1, 4, 4), "other.weight": plain(normal(2, 3))}
    names = [NAME, "other.weight", NAME + "_scale_inv"]
    folder = write_checkpoint(tmp_path, {name: tensors[name] for name in names}, files=3)
    assert [layer.storage for layer in read_layers(Checkpoint.open(folder))] == [
        "fp8_block",
        "plain",
    ]


U8 = ("U8", np.zeros((4, 4), np.uint8))
I32 = ("I32", np.zeros((4, 4), np.int32))
F32 = ("F32", np.ones((4, 4), np.float32))
CODES = ("F8_E4M3", np.zeros((4, 256), np.uint8))
PACKED = int4(NAME, 1, 8, 64)
BLOCKS = mxfp4("x", 1, 2, 4, 64)


@pytest.mark.parametrize(
    ("tensors", "error", "says"),
    [
        ({NAME: U8}, ArchitectureUnsupported, "U8"),
        ({"model.layers.0.q_proj.qweight": I32}, ArchitectureUnsupported, "qweight"),
        ({"a.qzeros": I32, "a.scales": F32}, ArchitectureUnsupported, "a.qzeros"),
        ({NAME: F32, "a.input_scale": F32}, ArchitectureUnsupported, "a.input_scale"),
        ({NAME: F32, NAME + "_scale": F32}, ArchitectureUnsupported, "_scale"),
        ({NAME: CODES}, CheckpointDamaged, "no scale"),
        ({NAME: CODES, NAME + "_scale_inv": U8}, ArchitectureUnsupported, "as U8"),
        ({NAME: CODES, NAME + "_scale_inv": F32}, ArchitectureUnsupported, "[4, 256]"),
        (
            {NAME: ("F8_E4M3", np.zeros(4, np.uint8)), NAME + "_scale": F32},
            ArchitectureUnsupported,
            "scales",
        ),
        (
            {name: value for name, value in PACKED.items() if not name.endswith("_shape")},
            CheckpointDamaged,
            "_shape",
        ),
        (
            {name: value for name, value in PACKED.items() if not name.endswith("_scale")},
            CheckpointDamaged,
            "_scale",
        ),
        (
            {**PACKED, NAME + "_shape": ("I64", np.array([8, 60]))},
            CheckpointDamaged,
            "4-bit",
        ),
        (
            {**PACKED, NAME + "_shape": ("I64", np.array([8, -64]))},
            CheckpointDamaged,
            "4-bit",
        ),
        ({**PACKED, NAME + "_shape": ("I64", np.zeros(3, np.int64))}, CheckpointDamaged, "dim"),
        ({**PACKED, NAME + "_shape": F32}, ArchitectureUnsupported, "as F32"),
        ({**PACKED, NAME + "_scale": plain(normal(1, 8, 3))}, CheckpointDamaged, "[8, 3]"),
        ({**PACKED, NAME + "_scale": plain(normal(1, 8, 0))}, CheckpointDamaged, "[8, 0]"),
        ({**PACKED, NAME + "_scale": plain(normal(1, 7, 2))}, CheckpointDamaged, "[7, 2]"),
        ({**PACKED, NAME + "_zero_point": I32}, ArchitectureUnsupported, "_zero_point"),
        ({**PACKED, NAME + "_g_idx": I32}, ArchitectureUnsupported, "_g_idx"),
        ({"x_blocks": U8, "x_scales": U8}, CheckpointDamaged, "x_blocks"),
        ({"x_blocks": BLOCKS["x_blocks"]}, ArchitectureUnsupported, "x_blocks"),
        ({**BLOCKS, "x_scales": U8}, CheckpointDamaged, "x_scales"),
        ({**BLOCKS, "x_scales": F32}, ArchitectureUnsupported, "as F32"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, tensors, error, says):
    folder = write_checkpoint(tmp_path, tensors)
    with pytest.raises(error) as caught:
        read_layers(Checkpoint.open(folder))
    assert says in caught.value.message and "model.safetensors" in caught.value.message


@pytest.mark.parametrize(
    "declared", [None, {"quant_method": "fp8"}, {"quant_method": "compressed-tensors"}]
)
def test_known_methods_pass(declared):
    check_method({"quantization_config": declared, "model_type": "any"})


@pytest.mark.parametrize("declared", [{"quant_method": "awq"}, {}, {"quant_method": 4}, "gptq", 1])
def test_other_methods_are_refused(declared):
    with pytest.raises(ArchitectureUnsupported, match=r"config\.json declares"):
        check_method({"quantization_config": declared})


def bad_fp8(kind):
    tensors = fp8_block(NAME, 1, 130, 130)
    codes, scale = tensors[NAME][1], tensors[NAME + "_scale_inv"][1]
    if kind == "code":
        codes[129, 128] = 0xFF
    else:
        scale[1, 1] = np.inf
    return tensors


def bad_plain(dtype, value):
    values = normal(1, 9, 9)
    values[8, 3] = value
    if dtype == "BF16":
        bits = plain(normal(1, 9, 9))[1]
        bits[8, 3] = 0x7FC0 if np.isnan(value) else 0x7F80
        return {NAME: ("BF16", bits)}
    return {NAME: plain(values, dtype)}


def bad_mxfp4():
    tensors = mxfp4(NAME, 1, 1, 4, 32)
    tensors[NAME + "_scales"][1][0, 3, 0] = 255
    return tensors


@pytest.mark.parametrize(
    "tensors",
    [
        bad_fp8("code"),
        bad_fp8("scale"),
        bad_plain("F32", np.nan),
        bad_plain("F16", -np.inf),
        bad_plain("BF16", np.nan),
        bad_plain("BF16", np.inf),
        bad_mxfp4(),
    ],
)
def test_nan_and_infinity_are_named(tmp_path, tensors):
    layer = only_layer(write_checkpoint(tmp_path, tensors))
    with pytest.raises(CheckpointDamaged, match=NAME):
        Reader().values(layer, 0, layer.rows)


def test_a_file_that_shrinks_is_an_error_and_no_signal(tmp_path):
    folder = write_checkpoint(tmp_path, {NAME: plain(normal(1, 900, 1000))})
    layer = only_layer(folder)
    os.truncate(folder / "model.safetensors", 400_000)
    with pytest.raises(CheckpointDamaged, match="shorter"):
        Reader().values(layer, 100, 300)
