import json
import random
from pathlib import Path

import numpy as np
import pytest

from moechat.errors import CheckpointDamaged
from moechat.weights.safetensors_header import read_header

PATH = Path("/models/m/model.safetensors")


def packed(header, data=b"", header_bytes=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if header_bytes is None else header_bytes
    return length.to_bytes(8, "little") + text + data


def entry(begin, end, dtype="U8", shape=None):
    return {
        "dtype": dtype,
        "shape": [end - begin] if shape is None else shape,
        "data_offsets": [begin, end],
    }


def read(content):
    return read_header(PATH, np.frombuffer(content, np.uint8))


def why(content):
    with pytest.raises(CheckpointDamaged) as caught:
        read(content)
    assert str(PATH) in caught.value.what
    return caught.value.why


def test_spans_come_in_order_of_bytes_and_count_from_the_files_start():
    header = {
        "__metadata__": {"format": "pt"},
        "second": entry(3, 11, "F32", [2, 1]),
        "first": entry(0, 3),
        "scalar": entry(11, 13, "BF16", []),
        "none": entry(13, 13, "F32", [0, 7]),
    }
    content = packed(header, bytes(13))
    data_begin = len(content) - 13
    spans = read(content)
    assert [(span.name, span.begin_byte - data_begin) for span in spans] == [
        ("first", 0),
        ("second", 3),
        ("scalar", 11),
        ("none", 13),
    ]
    assert spans[1].shape == (2, 1) and spans[1].dtype == "F32"
    assert spans[2].shape == () and spans[2].end_byte == len(content)


def test_a_file_too_short_for_a_header_says_its_size():
    assert "0 bytes" in why(b"")
    assert "7 bytes" in why(bytes(7))


@pytest.mark.parametrize("claimed", [2**63, 2**64 - 1, 3, 100_000_001])
def test_an_absurd_header_length_is_named(claimed):
    text = why(packed({}, header_bytes=claimed))
    assert f"claims {claimed} bytes" in text and "2 bytes follow" in text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"\x00\x01\x02", "not JSON"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b"[]", "not a JSON object"),
        (b"[" * 200_000, "too deep"),
        (b'{"a": 1, "a": 2}', "'a' twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", "cannot be read"),
    ],
)
def test_a_header_that_is_no_plain_json_object_is_refused(text, says):
    assert says in why(packed(text))


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        "text",
        [],
        {},
        {"dtype": "U8", "shape": [1]},
        {"dtype": "U8", "shape": [1], "data_offsets": [0]},
        {"dtype": "U8", "shape": [1], "data_offsets": 0},
    ],
)
def test_an_entry_without_its_three_fields_is_refused(value):
    assert "'w' has no dtype, shape and pair" in why(packed({"w": value}, b"x"))


@pytest.mark.parametrize(
    "offsets", [[-1, 0], [-4, -3], [1, 0], [0.0, 1.0], ["0", "1"], [None, 1], [False, True]]
)
def test_impossible_offsets_are_refused(offsets):
    header = {"w": {"dtype": "U8", "shape": [1], "data_offsets": offsets}}
    assert "'w' has impossible data_offsets" in why(packed(header, b"x"))


@pytest.mark.parametrize(
    "shape",
    [None, 1, [-1], [-1, -1], [1.0], ["1"], [True], [1] * 9, [2**63, 0], [2**40, 2**40, 0]],
)
def test_impossible_shapes_are_refused(shape):
    header = {"w": {"dtype": "U8", "shape": shape, "data_offsets": [0, 1]}}
    assert "'w' has an impossible shape" in why(packed(header, b"x"))


@pytest.mark.parametrize("dtype", ["F4", "", "f32", 7, None, ["U8"]])
def test_unknown_types_are_named(dtype):
    assert f"unknown type {dtype!r}" in why(packed({"w": entry(0, 1, dtype)}, b"x"))


def test_a_span_that_its_shape_does_not_fill_says_needed_and_present_bytes():
    text = why(packed({"w": entry(0, 20, "F32", [2, 3])}, bytes(20)))
    assert "needs 24 bytes and has 20" in text


def test_overlapping_spans_name_both_tensors():
    text = why(packed({"a": entry(0, 4), "b": entry(3, 7)}, bytes(7)))
    assert "'b' overlap" in text and "'a'" in text


def test_two_tensors_may_not_share_the_same_bytes():
    assert "overlap" in why(packed({"a": entry(0, 4), "b": entry(0, 4)}, bytes(4)))


def test_bytes_that_belong_to_no_tensor_are_refused():
    assert "2 bytes before tensor 'b'" in why(packed({"b": entry(2, 4)}, bytes(4)))
    assert "3 bytes at its end" in why(packed({"a": entry(0, 4)}, bytes(7)))


def test_a_cut_file_says_tensor_needed_and_present_bytes():
    content = packed({"a": entry(0, 4), "b": entry(4, 14), "c": entry(14, 20)}, bytes(20))
    text = why(content[:-13])
    assert "'b' needs 10 bytes and has 3" in text
    assert f"needs {len(content)} bytes and has {len(content) - 13}" in text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"<!DOCTYPE html><html><body>404</body></html>", "HTML page"),
        (b"\n<html>" + bytes(100), "HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "git-lfs"),
    ],
)
def test_other_content_under_the_models_name_is_said_plainly(content, says):
    assert says in why(content)


def test_names_from_the_file_cannot_carry_escape_codes_or_flood_the_message():
    text = why(packed({"\x1b[2J" + "n" * 5000: entry(0, 1, "F4")}, b"x"))
    assert "\x1b" not in text and len(text) < 300


def test_random_damage_is_refused_or_still_consistent():
    header = {"a": entry(0, 8, "F32", [2, 1]), "b": entry(8, 11), "c": entry(11, 13, "BF16", [])}
    whole = packed(header, bytes(13))
    draw = random.Random(20250101)
    refused = 0
    for _ in range(3000):
        content = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            content[draw.randrange(len(content))] = draw.choice(b'\x00\xff0159-,:"[]{}eE. ')
        if draw.random() < 0.3:
            del content[draw.randrange(len(content)) :]
        try:
            spans = read(bytes(content))
        except CheckpointDamaged:
            refused += 1
        else:
            assert spans[-1].end_byte == len(content)
    assert 2000 < refused < 3000
