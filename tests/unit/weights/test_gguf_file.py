import gguf_writer as w
import numpy as np
import pytest

from moechat.errors import CheckpointDamaged, ModelNotFound
from moechat.weights.gguf_file import GGUFCheckpoint
from moechat.weights.gguf_find import find_gguf

VECTOR = np.array([1.0, 2.0, 3.0], np.float32)


def part(number, count, tensors, total=None):
    metadata = {
        "split.no": np.uint16(number),
        "split.count": np.uint16(count),
        "split.tensors.count": np.int32(total or count),
    }
    if number == 0:
        metadata["general.architecture"] = "llama"
    return w.gguf_bytes(metadata, tensors)


@pytest.fixture
def split(tmp_path):
    for number in range(3):
        path = tmp_path / f"m-{number + 1:05}-of-00003.gguf"
        path.write_bytes(part(number, 3, {f"t{number}": VECTOR + number}))
    return tmp_path


def test_tensors_are_views_of_the_file(tmp_path):
    path = tmp_path / "m.gguf"
    half = np.array([[1, 2], [3, 4]], np.float16)
    blocks = np.arange(2 * 3 * 288, dtype=np.uint8).reshape(2, 3, 288)
    tensors = {
        "f32": VECTOR,
        "f16": half,
        "bf16": w.bf16(VECTOR),
        "i32": np.array([-1], np.int32),
        "q4_k": w.Blocks("Q4_K", (2, 3, 512), blocks),
    }
    path.write_bytes(w.gguf_bytes({"general.name": "x"}, tensors))
    checkpoint = GGUFCheckpoint.open([path])
    found = checkpoint.tensors
    assert found["f32"].array.dtype == np.float32 and (found["f32"].array == VECTOR).all()
    assert (found["f16"].array == half.view(np.uint16)).all()
    assert found["bf16"].array.tolist() == [0x3F80, 0x4000, 0x4040]
    assert found["i32"].array.tolist() == [-1]
    view = found["q4_k"]
    assert view.shape == (2, 3, 512) and view.dtype == "Q4_K" and view.file == path
    assert view.array.dtype == np.uint8 and (view.array == blocks).all()
    assert not view.array.flags.writeable and not found["f32"].array.flags.writeable
    assert checkpoint.metadata == {"general.name": "x"}
    assert checkpoint.total_bytes == 12 + 8 + 6 + 4 + 2 * 3 * 288
    kept = found["f32"].array
    checkpoint.close()
    assert checkpoint.tensors == {} and (kept == VECTOR).all()


def test_a_file_without_tensors_opens_and_an_empty_one_does_not(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(w.gguf_bytes({}))
    assert GGUFCheckpoint.open([path]).tensors == {}
    path.write_bytes(b"")
    with pytest.raises(CheckpointDamaged, match="has 0"):
        GGUFCheckpoint.open([path])


@pytest.mark.parametrize("named", ["m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "."])
def test_any_part_and_the_folder_name_the_whole_model(split, named):
    files = find_gguf(split / named)
    checkpoint = GGUFCheckpoint.open(files)
    assert [file.name[2:7] for file in checkpoint.files] == ["00001", "00002", "00003"]
    assert {name: tensor.array[0] for name, tensor in checkpoint.tensors.items()} == {
        "t0": 1,
        "t1": 2,
        "t2": 3,
    }
    assert checkpoint.metadata["general.architecture"] == "llama"
    assert checkpoint.tensors["t1"].file == split / "m-00002-of-00003.gguf"


def test_a_missing_part_is_named(split):
    (split / "m-00002-of-00003.gguf").unlink()
    for path in (split, split / "m-00001-of-00003.gguf"):
        with pytest.raises(CheckpointDamaged, match=r"1 of 3 parts are missing: m-00002-of-00003"):
            find_gguf(path)


def test_a_renamed_part_does_not_pass_for_a_model(split):
    path = split / "m-00001-of-00003.gguf"
    with pytest.raises(CheckpointDamaged, match="one of 3 parts"):
        GGUFCheckpoint.open([path.rename(split / "whole.gguf")])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (part(1, 2, {"t1": VECTOR}), "another model"),
        (part(2, 3, {"t1": VECTOR}), "the name of another part"),
        (part(1, 3, {"t0": VECTOR}), "is also in"),
        (part(1, 3, {"t1": VECTOR, "t9": VECTOR}), "they hold 4 tensors of 3"),
        (w.gguf_bytes({}, {"t1": VECTOR}), "another model"),
        (w.gguf_bytes({"split.count": "3"}, {"t1": VECTOR}), "another model"),
        (w.gguf_bytes({"split.count": np.array([3, 3])}, {"t1": VECTOR}), "another model"),
        (w.gguf_bytes({"split.count": 3, "split.no": "1"}, {"t1": VECTOR}), "of another part"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(split, content, says):
    (split / "m-00002-of-00003.gguf").write_bytes(content)
    with pytest.raises(CheckpointDamaged, match=says):
        GGUFCheckpoint.open(find_gguf(split))


def test_the_number_of_tensors_must_be_a_number(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(w.gguf_bytes({"split.tensors.count": np.array([1, 1])}, {"t": VECTOR}))
    with pytest.raises(CheckpointDamaged, match="they hold 1 tensors of"):
        GGUFCheckpoint.open([path])


def test_what_counts_as_a_gguf_model(tmp_path):
    assert find_gguf(tmp_path) is None and find_gguf(tmp_path / "absent.gguf") is None
    assert find_gguf(tmp_path / ("What is this? " * 99)) is None
    path = tmp_path / "m.gguf"
    path.write_bytes(w.gguf_bytes({}))
    assert find_gguf(tmp_path) == [path] == find_gguf(path)
    blob = tmp_path / "sha256-0"
    blob.write_bytes(w.gguf_bytes({}))
    assert find_gguf(blob) == [blob]
    (tmp_path / "mmproj-m.gguf").write_bytes(w.gguf_bytes({}))
    assert find_gguf(tmp_path) == [path]
    (tmp_path / "README.md").write_text("no model")
    assert find_gguf(tmp_path / "README.md") is None
    other = tmp_path / "other.gguf"
    other.write_bytes(b"")
    with pytest.raises(ModelNotFound, match=r"2 models: m\.gguf, other\.gguf\. Name one"):
        find_gguf(tmp_path)
    assert find_gguf(other) == [other]
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert find_gguf(tmp_path) is None
