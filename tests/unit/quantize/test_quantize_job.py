"""Whole jobs: what the new folder holds, and what is refused before anything is written."""

import json
import os

import numpy as np
import pytest
from quantize_reference import (
    bf16,
    decode,
    fp8_block,
    mxfp4,
    normal,
    plain,
    stored,
    write_checkpoint,
)

from moechat.errors import (
    ArchitectureUnsupported,
    CheckpointDamaged,
    DoesNotFit,
    ModelNotFound,
    Usage,
)
from moechat.quantize import target as target_module
from moechat.quantize.job import Job

LAYER = "model.layers.0."
EXPERTS = LAYER + "mlp.experts."
MATRICES = [
    LAYER + "self_attn.q_proj.weight",
    LAYER + "self_attn.o_proj.weight",
    EXPERTS + "0.gate_proj.weight",
    EXPERTS + "0.up_proj.weight",
    EXPERTS + "0.down_proj.weight",
    EXPERTS + "1.gate_proj.weight",
    EXPERTS + "1.up_proj.weight",
    LAYER + "mlp.shared_experts.down_proj.weight",
    "model.layers.1.self_attn.q_proj.weight",
]
NOT_INT4 = [LAYER + "self_attn.o_proj.weight", LAYER + "mlp.shared_experts.down_proj.weight"]
UNQUANTISED_MODULES = [LAYER + "mlp.gate", "model.layers.1.eh_proj", "lm_head"]


def relative(values, approximation):
    return np.sqrt(((values - approximation) ** 2).sum() / (values**2).sum())


def test_int4(tmp_path, source, convert):
    target = tmp_path / "target"
    report = convert(source, target, "int4")
    before, after, tensors = decode(source), decode(target), stored(target)
    assert set(after) == set(before)
    assert report.left == NOT_INT4
    for name in MATRICES:
        if name in NOT_INT4:
            assert tensors[name][0] == "BF16"
            assert relative(before[name], after[name]) < 2.0**-8
            continue
        rows, cols = before[name].shape
        assert tensors[name + "_packed"][:2] == ("I32", [rows, cols // 8])
        assert tensors[name + "_scale"][:2] == ("BF16", [rows, cols // 32])
        assert tensors[name + "_shape"] == (
            "I64",
            [2],
            np.array([rows, cols], np.int64).tobytes(),
        )
        assert name not in tensors
        # Of uniform nibbles, as in these sources, more is lost than of normal weights.
        assert relative(before[name], after[name]) < 0.12
    # What already is INT4 in groups of 32 is not rounded a second time.
    name = EXPERTS + "1.gate_proj.weight"
    for suffix in ("_packed", "_scale", "_shape"):
        assert tensors[name + suffix] == stored(source)[name + suffix]
    config = json.loads((target / "config.json").read_text())
    quantization = config["quantization_config"]
    assert quantization["quant_method"] == "compressed-tensors"
    assert quantization["format"] == "pack-quantized"
    weights = quantization["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["group_size"], weights["strategy"]) == (4, 32, "group")
    assert weights["symmetric"] is True and weights["type"] == "int"
    ignored = [name.removesuffix(".weight") for name in NOT_INT4] + UNQUANTISED_MODULES
    assert sorted(quantization["ignore"]) == sorted(ignored)
    assert (config["torch_dtype"], config["name"]) == ("float32", "Zürich")


def test_fp8(tmp_path, source, convert):
    target = tmp_path / "target"
    report = convert(source, target, "fp8")
    before, after, tensors = decode(source), decode(target), stored(target)
    assert set(after) == set(before) and report.left == []
    for name in MATRICES:
        rows, cols = before[name].shape
        assert tensors[name][:2] == ("F8_E4M3", [rows, cols])
        grid = [-(-rows // 128), -(-cols // 128)]
        assert tensors[name + "_scale_inv"][:2] == ("F32", grid)
        assert relative(before[name], after[name]) < 0.04
    name = LAYER + "self_attn.q_proj.weight"
    assert tensors[name] == stored(source)[name]
    assert tensors[name + "_scale_inv"] == stored(source)[name + "_scale_inv"]
    quantization = json.loads((target / "config.json").read_text())["quantization_config"]
    assert sorted(quantization.pop("modules_to_not_convert")) == sorted(UNQUANTISED_MODULES)
    assert quantization == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }


def test_bf16(tmp_path, source, convert):
    target = tmp_path / "target"
    convert(source, target, "bf16")
    before, tensors = decode(source), stored(target)
    assert set(tensors) == set(before)
    for name in MATRICES:
        assert tensors[name][0] == "BF16"
        assert tensors[name][2] == bf16(before[name]).tobytes()
    config = json.loads((target / "config.json").read_text())
    assert "quantization_config" not in config and config["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("to", ["int4", "fp8", "bf16"])
def test_everything_else_stays_as_it_is(tmp_path, source, convert, to):
    target = tmp_path / "target"
    convert(source, target, to)
    old, new = stored(source), stored(target)
    kept = [name for name in decode(source) if name not in MATRICES]
    assert len(kept) == 7
    assert {name: new[name] for name in kept} == {name: old[name] for name in kept}
    for name in ("tokenizer.json", "LICENSE", "chat_template.jinja"):
        assert (target / name).read_bytes() == (source / name).read_bytes()


def test_only_files_of_the_new_model_are_left(tmp_path, source, convert):
    for name in (".hidden", "pytorch_model.bin", "model.gguf", "x.part"):
        (source / name).write_text("old weights")
    (source / "original").mkdir()
    (source / "original" / "x").write_text("")
    convert(source, tmp_path / "target", "int4")
    shards = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
    names = ["config.json", "model.safetensors.index.json", "tokenizer.json", "LICENSE"]
    expected = [*shards, *names, "chat_template.jinja"]
    assert sorted(os.listdir(tmp_path / "target")) == sorted(expected)
    convert(source, tmp_path / "one", "int4", shard_bytes=10**9)
    assert [path.name for path in (tmp_path / "one").glob("*.safetensors")] == ["model.safetensors"]
    assert stored(tmp_path / "one") == stored(tmp_path / "target")


def test_every_tensor_is_aligned_to_its_elements(tmp_path, source, convert):
    sizes = {"I64": 8, "I32": 4, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}
    for to in ("int4", "fp8"):
        convert(source, tmp_path / to, to)
        for path in (tmp_path / to).glob("*.safetensors"):
            content = path.read_bytes()
            length = int.from_bytes(content[:8], "little")
            header = json.loads(content[8 : 8 + length])
            assert header.pop("__metadata__") == {"format": "pt"}
            for entry in header.values():
                assert (8 + length + entry["data_offsets"][0]) % sizes[entry["dtype"]] == 0


def test_the_report_is_what_the_reference_measures(tmp_path, source, convert):
    report = convert(source, tmp_path / "target", "int4").as_json()
    before, after = decode(source), decode(tmp_path / "target")
    rows = {row["kind"]: row for row in report["kinds"]}
    assert sum(row["tensors"] for row in report["kinds"]) == len(before)
    routed = [name for name in MATRICES if EXPERTS in name and "1.gate" not in name]
    difference = sum(((before[name] - after[name]) ** 2).sum() for name in routed)
    total = sum((before[name] ** 2).sum() for name in routed)
    error = rows["routed experts"]["relative_rms_error"]
    assert error == pytest.approx(np.sqrt(difference / total), rel=1e-4)
    worst = max(routed, key=lambda name: relative(before[name], after[name]))
    assert rows["routed experts"]["worst_tensor"] == worst
    assert rows["routed experts"]["worst_relative_rms_error"] == pytest.approx(
        relative(before[worst], after[worst]), rel=1e-4
    )
    assert rows["norms"]["relative_rms_error"] is None
    for folder, key in ((source, "bytes_before"), (tmp_path / "target", "bytes_after")):
        size = sum(len(content) for _, _, content in stored(folder).values())
        assert report[key] == size == sum(row[key] for row in report["kinds"])
    assert report["bytes_read"] == report["bytes_before"]
    assert report["not_quantised"] == NOT_INT4


def test_the_bytes_do_not_depend_on_the_number_of_processors(
    tmp_path, source, convert, monkeypatch
):
    for number in (1, 3):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, number=number: set(range(number)))
        convert(source, tmp_path / str(number), "int4")
    for path in sorted((tmp_path / "1").iterdir()):
        assert path.read_bytes() == (tmp_path / "3" / path.name).read_bytes(), path.name


def test_many_chunks_give_what_one_gives(tmp_path, source, convert, monkeypatch):
    convert(source, tmp_path / "whole", "int4")
    convert(source, tmp_path / "whole8", "fp8")
    monkeypatch.setattr("moechat.quantize.plan._CHUNK_WEIGHTS", 1000)
    monkeypatch.setattr("moechat.quantize.plan._CHUNK_BYTES", 777)
    convert(source, tmp_path / "pieces", "int4")
    convert(source, tmp_path / "pieces8", "fp8")
    assert stored(tmp_path / "pieces") == stored(tmp_path / "whole")
    assert stored(tmp_path / "pieces8") == stored(tmp_path / "whole8")


def test_there_and_back_is_lossless_from_int4(tmp_path, source, convert):
    convert(source, tmp_path / "int4", "int4")
    convert(tmp_path / "int4", tmp_path / "again", "int4")
    assert stored(tmp_path / "again") == stored(tmp_path / "int4")
    convert(tmp_path / "int4", tmp_path / "bf16", "bf16")
    before, after = decode(tmp_path / "int4"), decode(tmp_path / "bf16")
    for name, values in before.items():
        assert relative(values, after[name]) < 2.0**-8


@pytest.mark.parametrize("to", ["int4", "fp8"])
def test_stacked_experts_are_refused_by_name(tmp_path, to):
    name = LAYER + "mlp.experts.gate_up_proj"
    folder = write_checkpoint(tmp_path / "source", mxfp4(name, 1, 2, 8, 64))
    with pytest.raises(ArchitectureUnsupported, match="not a layout") as caught:
        Job(folder, tmp_path / "target", to)
    assert name in caught.value.message and "bf16" in caught.value.next_step
    assert not (tmp_path / "target").exists()


def test_stacked_experts_become_bf16(tmp_path, convert, monkeypatch):
    monkeypatch.setattr("moechat.quantize.plan._CHUNK_WEIGHTS", 500)
    name = LAYER + "mlp.experts.down_proj"
    folder = write_checkpoint(tmp_path / "source", mxfp4(name, 1, 3, 8, 96))
    convert(folder, tmp_path / "target", "bf16")
    dtype, shape, content = stored(tmp_path / "target")[name]
    assert (dtype, shape) == ("BF16", [3, 96, 8])
    assert content == bf16(decode(folder)[name]).tobytes()


def test_tensors_without_elements_are_kept(tmp_path, convert):
    tensors = {
        LAYER + "self_attn.q_proj.weight": plain(normal(1, 0, 64)),
        LAYER + "self_attn.k_proj.weight": plain(normal(1, 64, 0)),
        "model.norm.weight": plain(normal(2, 0)),
        "scalar": plain(np.float32(2).reshape(()), "F32"),
    }
    folder = write_checkpoint(tmp_path / "source", tensors)
    for to in ("int4", "fp8", "bf16"):
        convert(folder, tmp_path / to, to)
        assert stored(tmp_path / to) == stored(folder)


def test_layers_wider_than_the_engine_takes_are_refused(tmp_path):
    name = LAYER + "self_attn.q_proj.weight"
    folder = write_checkpoint(tmp_path / "widest", {name: plain(normal(1, 1, 65_536))})
    Job(folder, tmp_path / "target", "int4")
    folder = write_checkpoint(tmp_path / "source", {name: plain(normal(1, 1, 65_536 + 32))})
    with pytest.raises(ArchitectureUnsupported, match=name):
        Job(folder, tmp_path / "target", "int4")


@pytest.mark.parametrize("to", ["int4", "fp8", "bf16"])
def test_nan_names_the_tensor_and_leaves_no_model(tmp_path, convert, to):
    name = LAYER + "self_attn.q_proj.weight"
    values = normal(1, 64, 64)
    values[40, 3] = np.nan
    folder = write_checkpoint(tmp_path / "source", {name: plain(values, "F32")})
    with pytest.raises(CheckpointDamaged, match=name):
        convert(folder, tmp_path / "target", to)
    assert not (tmp_path / "target" / "config.json").exists()


def test_what_bf16_cannot_hold_is_an_error(tmp_path, convert):
    name = LAYER + "self_attn.q_proj.weight"
    folder = write_checkpoint(tmp_path / "source", {name: ("F32", np.full((4, 4), 3.4e38, "f4"))})
    with pytest.raises(CheckpointDamaged, match=name) as caught:
        convert(folder, tmp_path / "target", "bf16")
    assert "too large for BF16" in caught.value.why


def test_a_target_that_is_in_use_is_never_touched(tmp_path, source):
    used = tmp_path / "used"
    used.mkdir()
    (used / "mine").write_text("x")
    file = tmp_path / "file"
    file.write_text("x")
    for target in (used, file, source, tmp_path / "no" / "where"):
        with pytest.raises(Usage) as caught:
            Job(source, target, "int4")
        assert str(target) in caught.value.message and caught.value.exit_code == 2
    assert os.listdir(used) == ["mine"]


def test_an_empty_folder_may_be_the_target(tmp_path, source, convert):
    (tmp_path / "target").mkdir()
    assert convert(source, tmp_path / "target", "bf16")


@pytest.mark.parametrize("where", ["source", "source/int4", "link/int4", ".", "link"])
def test_source_and_target_do_not_lie_in_each_other(tmp_path, source, where):
    (tmp_path / "link").symlink_to(source)
    before = sorted(os.listdir(source))
    with pytest.raises(Usage, match="source, which is only read"):
        Job(source, tmp_path / where, "int4")
    assert sorted(os.listdir(source)) == before


def test_a_folder_beside_the_source_with_a_similar_name_is_fine(source, convert):
    assert convert(source, source.with_name("source-int4"), "int4").bytes_after > 0


@pytest.mark.parametrize("name", ["x" * 300, "/".join(["y" * 200] * 25), "loop/x"])
def test_a_name_that_cannot_be_made_is_named_with_the_reason(tmp_path, source, name):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(Usage, match=r"too long|Too many levels|no folder") as caught:
        Job(source, tmp_path / name, "int4")
    assert len(caught.value.message) < 500 and "Errno" not in caught.value.message


def test_what_the_system_does_not_make_is_told_with_its_reason(tmp_path, source, monkeypatch):
    def refuse(path, *arguments, **options):
        raise PermissionError(13, "Permission denied")

    job = Job(source, tmp_path / "target", "int4")
    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    with pytest.raises(Usage, match="cannot be made: Permission denied"):
        job.run(lambda progress: None)


@pytest.mark.parametrize("what", ["file", "folder", "folder with config"])
def test_gguf_is_told_to_be_no_source(tmp_path, what):
    (tmp_path / "in").mkdir()
    file = tmp_path / "in" / "model.gguf"
    file.write_bytes(b"GGUF")
    if what == "folder with config":
        (tmp_path / "in" / "config.json").write_text("{}")
    with pytest.raises(ArchitectureUnsupported, match="GGUF, which is no source for quantize"):
        Job(file if what == "file" else file.parent, tmp_path / "target", "int4")


@pytest.mark.parametrize("to", ["int4", "fp8", "bf16"])
def test_a_complete_result_is_known_again(tmp_path, source, convert, to):
    assert not Job(source, tmp_path / "target", to, shard_bytes=60_000).is_complete
    convert(source, tmp_path / "target", to)
    assert Job(source, tmp_path / "target", to, shard_bytes=60_000).is_complete


@pytest.mark.parametrize(
    "what", ["format", "shards", "more", "less", "copied", "config", "a weight", "header", "source"]
)
def test_the_result_of_another_job_is_not_taken_for_complete(tmp_path, source, convert, what):
    target, to, shard_bytes = tmp_path / "target", "int4", 60_000
    convert(source, target, to)
    shard = target / "model-00002-of-00003.safetensors"
    if what == "format":
        to = "fp8"
    elif what == "shards":
        shard_bytes = 10**9
    elif what == "more":
        (target / "mine").write_text("x")
    elif what == "less":
        (target / "LICENSE").unlink()
    elif what == "copied":
        (target / "LICENSE").write_text("mine!")
    elif what == "config":
        (target / "config.json").write_text("{}")
    elif what == "a weight":
        shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    elif what == "header":
        shard.write_bytes(shard.read_bytes().replace(b"BF16", b"F016", 1))
    else:  # as a fine-tune of the same model
        path = source / "model-00003-of-00003.safetensors"
        path.write_bytes(path.read_bytes()[:-2] + b"\x12\x34")
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    with pytest.raises(Usage, match="exists and is not empty"):
        Job(source, target, to, shard_bytes=shard_bytes)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before


def test_a_folder_that_is_no_model_is_named(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        Job(folder, tmp_path / "target", "int4")
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match="no weights"):
        Job(folder, tmp_path / "target", "int4")


def test_too_small_a_disk_is_told_in_numbers_before_anything_is_written(
    tmp_path, source, convert, monkeypatch
):
    job = Job(source, tmp_path / "target", "int4")
    needed = job.needed_bytes

    class Status:
        f_frsize = 1
        f_bavail = needed + 16_000_000

    monkeypatch.setattr(target_module.os, "statvfs", lambda path: Status)
    with pytest.raises(DoesNotFit) as caught:
        job.run(lambda progress: None)
    assert caught.value.exit_code == 4 and not (tmp_path / "target").exists()
    assert "MB are free" in caught.value.message
    Status.f_bavail = needed + 16_000_000 + needed // 100
    assert job.run(lambda progress: None) is not None
    sizes = sum(path.stat().st_size for path in (tmp_path / "target").iterdir())
    assert sizes == needed


def test_an_unfinished_result_is_no_source(tmp_path, source):
    (source / "quantize.journal").write_text("")
    with pytest.raises(Usage, match="unfinished"):
        Job(source, tmp_path / "target", "int4")


def test_fp8_of_mini_s_layout_is_found_again(tmp_path, convert):
    tensors = fp8_block(LAYER + "self_attn.q_proj.weight", 1, 130, 140)
    folder = write_checkpoint(tmp_path / "source", tensors)
    convert(folder, tmp_path / "bf16", "bf16")
    convert(tmp_path / "bf16", tmp_path / "fp8", "fp8")
    name = LAYER + "self_attn.q_proj.weight"
    before, after = decode(folder)[name], decode(tmp_path / "fp8")[name]
    assert relative(before, after) < 0.04
