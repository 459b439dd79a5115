import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from oracles import oracle_folder
from safetensors import safe_open

from moechat.errors import ArchitectureUnsupported, CheckpointDamaged, ModelNotFound
from moechat.models.architectures import bind_tensors, load_spec
from moechat.weights.mapped import INDEX_NAME, Checkpoint

ROOT = Path(__file__).parents[3]
MINI = ROOT / "moechat/data/mini"
FP8_ODD = oracle_folder("deepseek_v3_fp8_odd")
BF16 = oracle_folder("deepseek_v3_bf16")
Q_A = "model.layers.0.self_attn.q_a_proj.weight"


@pytest.fixture
def copy_of(tmp_path):
    def copy(folder):
        target = tmp_path / folder.name
        shutil.copytree(folder, target)
        return target

    return copy


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite(folder, change):
    """Write the folder's tensors again as one file after ``change(tensors)``.

    tensors: name -> {"dtype", "shape", "data"}
    """
    tensors = {
        name: {"dtype": t.dtype, "shape": list(t.shape), "data": t.array.tobytes()}
        for name, t in Checkpoint.open(folder).tensors.items()
    }
    change(tensors)
    for file in (*folder.glob("*.safetensors"), folder / INDEX_NAME):
        file.unlink()
    header, content = {}, b""
    for name, tensor in tensors.items():
        span = [len(content), len(content) + len(tensor["data"])]
        header[name] = {"dtype": tensor["dtype"], "shape": tensor["shape"], "data_offsets": span}
        content += tensor["data"]
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content)


def bind(folder):
    return bind_tensors(load_spec(folder), Checkpoint.open(folder))


def refused(error, folder):
    with pytest.raises(error) as caught:
        bind(folder)
    return caught.value.message


@pytest.mark.parametrize(
    ("folder", "count", "head"),
    [(MINI, 564, False), (BF16, 139, True), (oracle_folder("deepseek_v3_fp8_256"), 91, True)],
)
def test_real_checkpoints_bind_whole(folder, count, head):
    bound = bind(folder)
    assert len(bound) == count
    assert ("head" in bound) is head
    assert bound["embedding"].format == "bf16" and bound["embedding"].scale is None
    assert bound["layers.1.router_bias"].format == "f32"
    for role, tensor in bound.items():
        assert tensor.spec.role == role
        assert (tensor.scale is not None) == (tensor.format == "fp8_block")


def test_ragged_blocks_and_scales_in_another_shard_bind_and_the_mtp_layer_is_skipped():
    bound = bind(FP8_ODD)
    gate = bound["layers.1.experts.7.gate"]
    assert gate.format == "fp8_block"
    assert gate.weight.shape == (136, 200) and gate.weight.array.dtype == np.uint8
    assert gate.scale.shape == (2, 2) and gate.scale.array.dtype == np.float32
    assert gate.weight.file != gate.scale.file
    names = {tensor.weight.name for tensor in bound.values()}
    assert not any(name.startswith("model.layers.2.") for name in names)
    with safe_open(gate.scale.file, "np") as reference:
        expected = reference.get_tensor("model.layers.1.mlp.experts.7.gate_proj.weight_scale_inv")
    np.testing.assert_array_equal(gate.scale.array, expected)


def test_undeclared_mtp_layers_are_left_over(copy_of):
    folder = copy_of(FP8_ODD)
    change_config(folder, num_nextn_predict_layers=0)
    message = refused(CheckpointDamaged, folder)
    assert "not expected" in message and "model.layers.2." in message and "missing" not in message


def test_rotary_frequencies_stored_by_old_tools_are_skipped(copy_of):
    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = {
            "dtype": "F32",
            "shape": [8],
            "data": bytes(32),
        }

    folder = copy_of(BF16)
    rewrite(folder, add)
    assert len(bind(folder)) == 139


def test_missing_and_left_over_tensors_are_listed_together_with_counts(copy_of):
    def rename(tensors):
        for expert in range(5):
            name = f"model.layers.1.mlp.experts.{expert}.up_proj.weight"
            tensors[name.replace("up_proj", "w3")] = tensors.pop(name)

    folder = copy_of(BF16)
    rewrite(folder, rename)
    message = refused(CheckpointDamaged, folder)
    assert "5 missing: 'model.layers.1.mlp.experts.0.up_proj.weight'" in message
    assert "5 not expected: 'model.layers.1.mlp.experts.0.w3.weight'" in message
    assert message.count("and 2 more") == 2


def test_a_tied_head_that_is_stored_all_the_same_is_not_ignored(copy_of):
    folder = copy_of(BF16)
    change_config(folder, tie_word_embeddings=True)
    assert "1 not expected: 'lm_head.weight'" in refused(CheckpointDamaged, folder)


def test_a_wrong_shape_names_tensor_and_both_shapes(copy_of):
    folder = copy_of(BF16)
    change_config(folder, q_lora_rank=40)
    message = refused(CheckpointDamaged, folder)
    assert Q_A in message and "[48, 96]" in message and "[40, 96]" in message


def test_a_transposed_weight_is_a_wrong_shape(copy_of):
    folder = copy_of(BF16)
    rewrite(folder, lambda tensors: tensors[Q_A]["shape"].reverse())
    assert "[96, 48]" in refused(CheckpointDamaged, folder)


def test_a_type_without_a_kernel_is_named(copy_of):
    folder = copy_of(BF16)
    rewrite(folder, lambda tensors: tensors[Q_A].update(dtype="F16"))
    message = refused(ArchitectureUnsupported, folder)
    assert Q_A in message and "as F16" in message and "fp8_block, bf16, f32" in message


def test_a_norm_cannot_be_fp8(copy_of):
    def change(tensors):
        tensors["model.norm.weight"].update(dtype="F8_E4M3", data=bytes(96))

    folder = copy_of(BF16)
    rewrite(folder, change)
    assert "'model.norm.weight' as F8_E4M3" in refused(ArchitectureUnsupported, folder)


def test_fp8_without_its_scales_is_missing_them(copy_of):
    folder = copy_of(FP8_ODD)
    rewrite(folder, lambda tensors: tensors.pop(Q_A + "_scale_inv"))
    assert f"1 missing: '{Q_A}_scale_inv'" in refused(CheckpointDamaged, folder)


def test_scales_without_fp8_are_left_over(copy_of):
    def change(tensors):
        tensors[Q_A].update(dtype="BF16", data=tensors[Q_A]["data"] * 2)

    folder = copy_of(FP8_ODD)
    rewrite(folder, change)
    assert f"1 not expected: '{Q_A}_scale_inv'" in refused(CheckpointDamaged, folder)


def test_a_scale_grid_must_be_rounded_up(copy_of):
    def shrink(tensors):
        name = "model.layers.1.mlp.experts.7.gate_proj.weight_scale_inv"
        tensors[name].update(shape=[1, 1], data=bytes(4))

    folder = copy_of(FP8_ODD)
    rewrite(folder, shrink)
    message = refused(CheckpointDamaged, folder)
    assert "[1, 1]" in message and "[2, 2]" in message


def test_scales_must_be_float32(copy_of):
    def change(tensors):
        scale = tensors[Q_A + "_scale_inv"]
        scale.update(dtype="BF16", data=scale["data"][: len(scale["data"]) // 2])

    folder = copy_of(FP8_ODD)
    rewrite(folder, change)
    assert f"'{Q_A}_scale_inv' as BF16" in refused(ArchitectureUnsupported, folder)


def test_a_folder_without_config_is_no_model(tmp_path):
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        load_spec(tmp_path)
    with pytest.raises(ModelNotFound, match="no such folder"):
        load_spec(tmp_path / "gone")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["", "{", "[1]", "<html>"])
def test_damaged_configs_are_named(copy_of, name, text):
    folder = copy_of(BF16)
    (folder / name).write_text(text)
    with pytest.raises(CheckpointDamaged, match=name):
        load_spec(folder)


@pytest.mark.parametrize("value", [["LlamaForCausalLM"], [], None, "DeepseekV3ForCausalLM", [7]])
def test_an_unknown_architecture_lists_what_is_implemented(copy_of, value):
    folder = copy_of(BF16)
    change_config(folder, architectures=value)
    with pytest.raises(ArchitectureUnsupported) as caught:
        load_spec(folder)
    assert repr(value) in caught.value.what
    assert "implements DeepseekV3ForCausalLM" in caught.value.why


def test_generation_config_is_optional_and_adds_end_tokens(copy_of):
    folder = copy_of(BF16)
    assert load_spec(folder).end_ids == (1,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 1, 9]}')
    assert load_spec(folder).end_ids == (7, 1, 9)
    (folder / "generation_config.json").unlink()
    assert load_spec(folder).end_ids == (1,)
