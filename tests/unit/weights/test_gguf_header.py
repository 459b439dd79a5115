import struct
import time
from pathlib import Path

import gguf_writer as w
import numpy as np
import pytest

from moechat.errors import CheckpointDamaged
from moechat.weights.gguf_header import read_header

PATH = Path("/models/m.gguf")
METADATA = {
    "general.architecture": "llama",
    "an.int": 7,
    "a.float": 0.5,
    "a.bool": True,
    "a.big": np.uint64(2**63),
    "a.negative": np.int16(-3),
    "some.strings": ["a", "", "Größe", "x" * 300],
    "some.numbers": np.array([1.5, -2.0], np.float64),
    "some.bools": np.array([True, False]),
}
TENSORS = {
    "first": np.arange(6, dtype=np.float32).reshape(2, 3),
    "blocks": w.Blocks("Q8_0", (2, 1, 64), np.arange(136, dtype=np.uint8).reshape(2, 1, 68)),
    "last": np.ones(5, np.float16),
}


def plain(metadata):
    return {
        key: item.tolist() if hasattr(item, "tolist") else item for key, item in metadata.items()
    }


def read(content):
    return read_header(PATH, np.frombuffer(content, np.uint8))


def why(content):
    with pytest.raises(CheckpointDamaged) as caught:
        read(content)
    assert str(PATH) in caught.value.what
    return caught.value.why


def header(*pairs, tensors=(), counts=None, version=3):
    num_tensors, num_pairs = counts or (len(tensors), len(pairs))
    return b"".join(
        [b"GGUF", struct.pack("<IQQ", version, num_tensors, num_pairs), *pairs, *tensors]
    )


def pair(key, type_number, raw):
    return w.string(key) + struct.pack("<I", type_number) + raw


@pytest.mark.parametrize("version", [2, 3])
def test_every_kind_of_value_is_read(version):
    metadata = read(w.gguf_bytes(METADATA, version=version)).metadata
    plain = {
        key: value.tolist() if hasattr(value, "tolist") else value
        for key, value in metadata.items()
    }
    expected = {
        key: getattr(value, "tolist", lambda v=value: v)() for key, value in METADATA.items()
    }
    assert plain == expected
    assert type(metadata["an.int"]) is int and type(metadata["a.bool"]) is bool
    strings = metadata["some.strings"]
    assert strings[2] == "Größe" and strings[-1] == "x" * 300 and strings[1:3] == ["", "Größe"]
    assert list(strings) == expected["some.strings"] and len(strings) == 4
    with pytest.raises(IndexError):
        strings[4]


def test_tensors_lie_where_the_header_says():
    content = w.gguf_bytes(METADATA, TENSORS)
    spans = read(content).tensors
    assert [span[:3] for span in spans] == [
        ("first", "F32", (2, 3)),
        ("blocks", "Q8_0", (2, 1, 64)),
        ("last", "F16", (5,)),
    ]
    for span in spans:
        assert span.begin_byte % 32 == 0
        stored = w.as_blocks(TENSORS[span.name]).data.tobytes()
        assert content[span.begin_byte : span.end_byte] == stored


def test_the_alignment_is_the_files_own():
    content = w.gguf_bytes({"general.alignment": 256}, TENSORS, alignment=256)
    assert [span.begin_byte % 256 for span in read(content).tensors] == [0, 0, 0]


def test_a_file_may_hold_no_tensor_and_no_metadata():
    assert read(header()) == ({}, [])


def test_a_file_cut_anywhere_is_named_damaged():
    content = w.gguf_bytes(METADATA, TENSORS)
    needed = read(content).tensors[-1].end_byte
    for size in range(needed):
        with pytest.raises(CheckpointDamaged):
            read(content[:size])
    read(content[:needed])  # only padding is missing


def test_a_cut_file_says_how_much_is_missing():
    content = w.gguf_bytes({}, TENSORS)
    end = read(content).tensors[-1].end_byte
    text = why(content[: end - 4])
    assert "'last' needs 10 bytes and has 6" in text and f"needs {end} bytes" in text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "its first bytes needs the bytes up to 4 and the file has 0"),
        (b"PK\x03\x04" + bytes(60), "does not begin with GGUF"),
        (b"<!DOCTYPE html><html>", "an HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer"),
        (header(version=1), "version 1 of the format"),
        (header(version=4), "version 4 of the format"),
        (header(version=3 << 24), "big-endian"),
        (header(counts=(2**64 - 1, 0)), "claims 18446744073709551615 tensors"),
        (header(counts=(0, 2**63)), "claims 9223372036854775808 pairs"),
        (header(counts=(0, 1)) + bytes(12), "claims 1 pairs"),
        (header(pair("k", 13, bytes(8))), "'k' has the unknown type 13"),
        (header(pair("k", 4, bytes(4)), pair("k", 4, bytes(4))), "gives 'k' twice"),
        (header(w.string(b"\xff\xfe") + bytes(8)), "a key is not UTF-8"),
        (header(pair("k", 8, w.string(b"\x80"))), "'k' is not UTF-8"),
        (header(pair("k", 8, struct.pack("<Q", 2**62))), "claims 4611686018427387904 bytes"),
        (header(pair("k", 8, struct.pack("<Q", 99))), "cut short: 'k'"),
        (header(pair("k", 9, struct.pack("<IQ", 4, 2**60))), "cut short: 'k'"),
        (header(pair("k", 9, struct.pack("<IQ", 8, 2**60))), "claims 1152921504606846976 strings"),
        (header(pair("k", 9, struct.pack("<IQ", 9, 1))), "array of the unsupported type 9"),
        (header(pair("k", 9, struct.pack("<IQQQ", 8, 2, 2**64 - 9, 0))), "do not end within"),
        (header(pair("k", 9, struct.pack("<IQQQ", 8, 2, 0, 2**63))), "do not end within"),
        (header(pair("general.alignment", 4, struct.pack("<I", 24))), "24 is no power of two"),
        (header(pair("general.alignment", 4, bytes(4))), "general.alignment 0"),
        (header(pair("general.alignment", 8, w.string("32"))), "general.alignment '32'"),
        (header(pair("general.alignment", 4, struct.pack("<I", 2**31))), "2147483648"),
    ],
)  # fmt: skip
def test_bad_headers_say_what_is_wrong(content, says):
    assert says in why(content)


def described(*infos, data=bytes(4096)):
    content = header(tensors=infos)
    return content + bytes(-len(content) % 32) + data


@pytest.mark.parametrize(
    ("infos", "says"),
    [
        ([w.tensor_info("t", (2, 2, 2, 2, 2), 0, 0)], "'t' has 5 dimensions"),
        ([w.tensor_info("t", (2**32, 2**32), 0, 0)], "impossible shape"),
        ([w.tensor_info("t", (2, 0), 0, 0)], "impossible shape [2, 0]"),
        ([w.tensor_info("t", (4,), 4, 0)], "unknown element type 4"),
        ([w.tensor_info("t", (4,), 2**32 - 1, 0)], "unknown element type 4294967295"),
        ([w.tensor_info("t", (2, 100), 12, 0)], "100 elements a row"),
        ([w.tensor_info("t", (), 8, 0)], "1 elements a row"),
        ([w.tensor_info("t", (4,), 0, 8)], "not aligned to 32 bytes"),
        ([w.tensor_info("t", (4,), 0, 4096)], "cut short: tensor 't' needs 16 bytes and has 0"),
        ([w.tensor_info("t", (4,), 0, 2**64 - 32)], "cut short"),
        ([w.tensor_info("t", (1025,), 0, 0)], "needs 4100 bytes and has 4096"),
        ([w.tensor_info("t", (4,), 0, 0), w.tensor_info("t", (4,), 0, 32)], "'t' twice"),
        ([w.tensor_info("b", (9,), 0, 32), w.tensor_info("a", (9,), 0, 0)], "'a' and 'b' overlap"),
        ([w.tensor_info("a", (4,), 0, 0), w.tensor_info("b", (4,), 0, 0)], "overlap"),
        ([w.string(b"\xc3\x28") + bytes(60)], "not UTF-8"),
        ([w.string("n" * 70_000)], "70000 bytes of text"),
    ],
)  # fmt: skip
def test_bad_tensor_descriptions_say_what_is_wrong(infos, says):
    assert says in why(described(*infos))


def test_strings_that_are_not_utf8_are_refused_when_read():
    content = header(pair("k", 9, struct.pack("<IQ", 8, 2) + w.string("ok") + w.string(b"\xff")))
    strings = read(content).metadata["k"]
    assert strings[0] == "ok"
    for look in (lambda: strings[1], strings.tolist):
        with pytest.raises(ValueError, match="string 1 of 'k' is not UTF-8"):
            look()


def test_a_string_is_found_without_decoding_the_others():
    hidden = w.string("b").decode("latin-1")  # its bytes lie within another string first
    content = header(
        pair(
            "k",
            9,
            struct.pack("<IQ", 8, 5) + b"".join(map(w.string, [b"\xff", hidden, "b", "ü", "b"])),
        )
    )
    strings = read(content).metadata["k"]
    assert strings.index("b") == 2 and strings.index("ü") == 3
    assert strings.index("b", 3) == 4 and strings.index("b", 1, 3) == 2
    for absent in ("", "c", "bb", "\udc80"):
        with pytest.raises(ValueError, match="not among"):
            strings.index(absent)
    with pytest.raises(ValueError, match="not among"):
        strings.index("b", 5)


def test_any_byte_is_a_bool():
    content = header(pair("k", 7, b"\x02"), pair("l", 9, struct.pack("<IQ", 7, 3) + b"\0\x07\x01"))
    metadata = read(content).metadata
    assert metadata["k"] is True and metadata["l"].tolist() == [False, True, True]


def test_bytes_changed_at_random_never_raise_anything_else():
    content = bytearray(w.gguf_bytes(METADATA, TENSORS))
    random = np.random.default_rng(1)
    for _ in range(2000):
        damaged = bytearray(content)
        for place in random.integers(0, len(content), 3):
            damaged[place] = random.integers(0, 256)
        try:
            result = read(bytes(damaged))
        except CheckpointDamaged:
            continue
        for span in result.tensors:
            assert 0 <= span.begin_byte < span.end_byte <= len(content)


def test_a_large_vocabulary_opens_at_once():
    tokens = [f"token{number}" for number in range(262_144)]
    content = w.gguf_bytes({"tokens": tokens})
    begin = time.process_time()
    found = read(content).metadata["tokens"]
    assert time.process_time() - begin < 0.3
    assert found[262_143] == "token262143"
