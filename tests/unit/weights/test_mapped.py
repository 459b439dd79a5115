import json
import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from oracles import oracle_folder
from safetensors import safe_open

from moechat.errors import CheckpointDamaged, ModelNotFound
from moechat.weights import mapped
from moechat.weights.mapped import INDEX_NAME, Checkpoint, map_files

ROOT = Path(__file__).parents[3]
MINI = ROOT / "moechat/data/mini"
SHARD_1, SHARD_2 = (f"model-0000{part}-of-00002.safetensors" for part in (1, 2))


def write_file(path, tensors):
    """tensors: name -> (dtype, shape, bytes)"""
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        span = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": span}
        data += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # as the library does: the first tensor is aligned
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_index(folder, owners):
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": owners}))


@pytest.fixture
def sharded(tmp_path):
    """A folder of two shards, {a, b} and {c}, with its index."""
    one = ("U8", [1], b"x")
    write_file(tmp_path / SHARD_1, {"a": one, "b": one})
    write_file(tmp_path / SHARD_2, {"c": one})
    write_index(tmp_path, {"a": SHARD_1, "b": SHARD_1, "c": SHARD_2})
    return tmp_path


def damage(folder):
    with pytest.raises(CheckpointDamaged) as caught:
        Checkpoint.open(folder)
    assert caught.value.exit_code == 3
    return caught.value.message


def anonymous_kb():
    with open("/proc/self/smaps_rollup") as rollup:
        return next(int(line.split()[1]) for line in rollup if line.startswith("Anonymous:"))


@pytest.mark.parametrize(
    "folder",
    [MINI, *(oracle_folder(f"deepseek_v3_{name}") for name in ("bf16", "fp8_256", "fp8_odd"))],
)
def test_every_tensor_equals_what_the_safetensors_library_reads(folder):
    checkpoint = Checkpoint.open(folder)
    seen = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "np") as reference:
            for name in reference.keys():  # noqa: SIM118 - not a dict
                tensor = checkpoint.tensors[name]
                part = reference.get_slice(name)
                assert (tensor.file, tensor.dtype) == (file, part.get_dtype())
                assert list(tensor.shape) == part.get_shape()
                seen += 1
                if tensor.dtype == "F32":
                    np.testing.assert_array_equal(tensor.array, reference.get_tensor(name))
    assert seen == len(checkpoint.tensors)
    index = json.loads((folder / INDEX_NAME).read_text())
    assert checkpoint.total_bytes == index["metadata"]["total_size"]


def test_views_have_the_documented_types_and_bytes_also_when_unaligned(tmp_path):
    floats = np.array([1.5, -2.0], "<f4")
    codes = np.array([[0x3F80, 0xC000, 1]], "<u2")
    write_file(
        tmp_path / "model.safetensors",
        {
            "odd": ("F8_E4M3", [3], b"\x7f\x00\xff"),
            "f32": ("F32", [2], floats.tobytes()),
            "bf16": ("BF16", [1, 3], codes.tobytes()),
            "f16": ("F16", [3, 1], codes.tobytes()),
            "i64": ("I64", [], (-5).to_bytes(8, "little", signed=True)),
        },
    )
    arrays = {name: t.array for name, t in Checkpoint.open(tmp_path).tensors.items()}
    assert not arrays["f32"].flags.aligned
    np.testing.assert_array_equal(arrays["odd"], np.array([0x7F, 0, 0xFF], np.uint8))
    np.testing.assert_array_equal(arrays["f32"], floats)
    np.testing.assert_array_equal(arrays["bf16"], codes)
    np.testing.assert_array_equal(arrays["f16"], codes.reshape(3, 1))
    assert arrays["i64"] == -5
    assert {name: array.dtype for name, array in arrays.items()} == {
        "odd": np.uint8,
        "f32": np.float32,
        "bf16": np.uint16,
        "f16": np.uint16,
        "i64": np.int64,
    }


def test_views_are_read_only():
    array = Checkpoint.open(MINI).tensors["model.norm.weight"].array
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 0
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True


def test_the_mapping_is_shared_and_reading_adds_no_anonymous_memory():
    before_kb = anonymous_kb()
    checkpoint = Checkpoint.open(MINI)
    total = sum(int(t.array.view(np.uint8).sum()) for t in checkpoint.tensors.values() if t.shape)
    grown_kb = anonymous_kb() - before_kb
    assert total > 0
    assert grown_kb < 8_000 < checkpoint.total_bytes / 1024
    with open("/proc/self/maps") as maps:
        modes = {line.split()[1] for line in maps if "data/mini/model-" in line}
    assert modes == {"r--s"}


def flags_of(path):
    """What the kernel was told of a file's mapping: two letters each."""
    with open("/proc/self/smaps") as smaps:
        lines = iter(smaps)
        assert any(line.rstrip().endswith(str(path)) for line in lines)
        return next(line for line in lines if line.startswith("VmFlags:")).split()[1:]


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="a kernel without huge pages"
)
@pytest.mark.parametrize(
    ("free_bytes", "large"), [(6_000_000, True), (5_999_999, False), (0, False), (None, False)]
)
def test_large_pages_are_asked_for_when_memory_holds_all_files(
    tmp_path, monkeypatch, free_bytes, large
):
    monkeypatch.setattr(mapped, "free_memory_bytes", lambda: free_bytes)
    paths = [tmp_path / name for name in ("one", "two")]
    for path in paths:
        path.write_bytes(bytes(3_000_000))
    for path, content in map_files(paths):
        assert content.nbytes == 3_000_000
        assert ("hg" in flags_of(path)) == large


def test_files_before_one_that_is_gone_are_mapped(tmp_path):
    here = tmp_path / "here"
    here.write_bytes(b"x")
    files = map_files([here, tmp_path / "gone"])
    assert next(files)[1].tobytes() == b"x"
    with pytest.raises(CheckpointDamaged, match="gone"):
        next(files)


def test_an_array_outlives_close_and_the_last_one_unmaps(sharded):
    def is_mapped():
        with open("/proc/self/maps") as maps:
            return str(sharded) in maps.read()

    checkpoint = Checkpoint.open(sharded)
    array = checkpoint.tensors["c"].array
    checkpoint.close()
    assert array.tobytes() == b"x" and is_mapped() and checkpoint.tensors == {}
    del array
    assert not is_mapped()


def test_a_single_file_needs_no_index_and_no_particular_name(tmp_path):
    write_file(tmp_path / "weights.safetensors", {"a": ("U8", [2], b"hi")})
    assert Checkpoint.open(tmp_path).tensors["a"].array.tobytes() == b"hi"
    write_file(tmp_path / "model.safetensors", {"a": ("U8", [2], b"ho")})
    assert Checkpoint.open(tmp_path).tensors["a"].array.tobytes() == b"ho"


def test_shards_may_be_links_as_in_the_hub_cache(sharded, tmp_path_factory):
    blob = tmp_path_factory.mktemp("blobs") / "blob"
    (sharded / SHARD_2).rename(blob)
    (sharded / SHARD_2).symlink_to(blob)
    assert len(Checkpoint.open(sharded).tensors) == 3


@pytest.mark.parametrize("name", ["nowhere", "model.safetensors/x"])
def test_a_folder_without_weights_is_not_a_model(tmp_path, name):
    with pytest.raises(ModelNotFound, match="no weights"):
        Checkpoint.open(tmp_path / name)


def test_all_missing_shards_are_listed_at_once(tmp_path):
    shards = [f"model-0000{part}-of-00004.safetensors" for part in (1, 2, 3, 4)]
    write_file(tmp_path / shards[1], {"t1": ("U8", [1], b"x")})
    write_index(tmp_path, {f"t{part}": shard for part, shard in enumerate(shards)})
    message = damage(tmp_path)
    assert "3 of 4" in message
    assert all((shard in message) is (shard != shards[1]) for shard in shards)


@pytest.mark.parametrize("kind", ["folder", "pipe", "dangling link"])
def test_a_shard_that_is_no_file_is_missing(sharded, kind):
    shard = sharded / SHARD_2
    shard.unlink()
    if kind == "folder":
        shard.mkdir()
    elif kind == "pipe":
        os.mkfifo(shard)
    else:
        shard.symlink_to(sharded / "gone")
    assert "1 of 2" in damage(sharded)


@pytest.mark.parametrize("count", [1, 2])
def test_shards_without_an_index_ask_for_it(tmp_path, count):
    for part in range(count):
        write_file(
            tmp_path / f"model-0000{2 + part}-of-00009.safetensors", {f"t{part}": ("U8", [1], b"x")}
        )
    message = damage(tmp_path)
    assert INDEX_NAME in message and f"{count} part(s)" in message


def test_a_truncated_shard_names_file_tensor_and_bytes(tmp_path):
    folder = tmp_path / "mini"
    shutil.copytree(MINI, folder)
    shard = folder / "model-00002-of-00003.safetensors"
    size = shard.stat().st_size
    os.truncate(shard, size - 1000)
    message = damage(folder)
    assert shard.name in message and "cut short: tensor 'model.layers." in message
    assert f"needs {size} bytes and has {size - 1000}" in message


def test_an_empty_shard_is_named(sharded):
    (sharded / SHARD_1).write_bytes(b"")
    message = damage(sharded)
    assert SHARD_1 in message and "0 bytes" in message


def test_swapped_shards_are_recognised(sharded):
    (sharded / SHARD_1).rename(sharded / "x")
    (sharded / SHARD_2).rename(sharded / SHARD_1)
    (sharded / "x").rename(sharded / SHARD_2)
    message = damage(sharded)
    assert SHARD_1 in message and SHARD_2 in message and "swapped" in message
    assert "'a' and 1 more" in message


def test_a_shard_overwritten_by_another_is_recognised(sharded):
    shutil.copy(sharded / SHARD_1, sharded / SHARD_2)
    message = damage(sharded)
    assert f"{SHARD_2} is damaged" in message and "does not hold 'c'" in message


def test_an_index_that_names_an_absent_tensor_is_refused(sharded):
    write_index(sharded, {"a": SHARD_1, "b": SHARD_1, "c": SHARD_2, "ghost": SHARD_2})
    message = damage(sharded)
    assert "'ghost'" in message and SHARD_2 in message and "swapped" not in message


def test_a_tensor_in_two_shards_is_refused(sharded):
    one = ("U8", [1], b"y")
    write_file(sharded / SHARD_2, {"a": one, "c": one})
    message = damage(sharded)
    assert "'a' is also in" in message and SHARD_1 in message and SHARD_2 in message


@pytest.mark.parametrize("name", ["../up", "/etc/passwd", "a/b.safetensors", "", 7, None, "a\0"])
def test_an_index_cannot_name_files_outside_its_folder(sharded, name):
    write_index(sharded, {"a": name})
    assert "no file name" in damage(sharded)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "no weight_map"),
        (b'{"weight_map": []}', "no weight_map"),
        (b'{"weight_map": {}}', "no weight_map"),
        (b'{"weight_map": {"a": "x", "a": "y"}}', "'a' twice"),
        (b"<!doctype html>", "HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git-lfs"),
    ],
)
def test_a_damaged_index_says_what_it_is(sharded, text, says):
    (sharded / INDEX_NAME).write_bytes(text)
    message = damage(sharded)
    assert says in message and INDEX_NAME in message


def test_an_index_that_is_a_pipe_does_not_block(sharded):
    (sharded / INDEX_NAME).unlink()
    os.mkfifo(sharded / INDEX_NAME)
    assert "not a file" in damage(sharded)
