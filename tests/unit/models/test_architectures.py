import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from fake_checkpoint import FakeCheckpoint, checkpoint_of, config_of

import moechat
from moechat.errors import ArchitectureUnsupported, CheckpointDamaged, ModelNotFound
from moechat.models.architectures import (
    bind_tensors,
    load_config,
    load_spec,
    read_spec,
    tensor_table,
)
from moechat.weights.mapped import Checkpoint

MINI = Path(moechat.__file__).parent / "data/mini"
FP8_ODD, BF16 = "deepseek_v3_fp8_odd", "deepseek_v3_bf16"
Q_A = "model.layers.0.self_attn.q_a_proj.weight"


@pytest.fixture
def folder(tmp_path):
    for name in ("config.json", "generation_config.json"):
        shutil.copyfile(MINI / name, tmp_path / name)
    return tmp_path


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def bind(name, checkpoint=None, **changes):
    config = config_of(name) | changes
    return bind_tensors(read_spec(config, {}), checkpoint or checkpoint_of(name), config)


def refused(error, name, checkpoint=None, **changes):
    with pytest.raises(error) as caught:
        bind(name, checkpoint, **changes)
    return caught.value.message


def test_a_real_checkpoint_binds_whole():
    bound = bind_tensors(load_spec(MINI), Checkpoint.open(MINI), load_config(MINI))
    roles = {tensor.spec.role: tensor for tensor in bound}
    assert len(roles) == len(bound) == 564 and "head" not in roles
    gate = roles["layers.1.experts.7.gate"]
    assert (gate.format, gate.block) == ("fp8", (128, 128))
    assert gate.data.array.dtype == np.uint8 and gate.scale.array.dtype == np.float32
    assert roles["embedding"].format == "bf16" and roles["embedding"].scale is None


def test_bound_tensors_follow_the_table():
    spec, config = read_spec(config_of(FP8_ODD), {}), config_of(FP8_ODD)
    table = tensor_table(spec, config)
    assert [bound.spec for bound in bind(FP8_ODD)] == table


def test_ragged_blocks_bind_and_the_mtp_layer_is_skipped():
    roles = {tensor.spec.role: tensor for tensor in bind(FP8_ODD)}
    gate = roles["layers.1.experts.7.gate"]
    assert (gate.format, gate.data.shape, gate.scale.shape) == ("fp8", (136, 200), (2, 2))
    assert not any(tensor.data.name.startswith("model.layers.2.") for tensor in roles.values())


def test_undeclared_mtp_layers_are_left_over():
    message = refused(CheckpointDamaged, FP8_ODD, num_nextn_predict_layers=0)
    assert "not expected" in message and "model.layers.2." in message and "missing" not in message


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.self_attn.k_scale",
        "model.layers.0.self_attn.v_scale",
        "model.layers.0.self_attn.o_proj.input_scale",
    ],
)
def test_leftovers_of_old_tools_and_of_calibration_are_skipped(name):
    assert len(bind(BF16, checkpoint_of(BF16).add(name, "F32", 1))) == 139


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.o_proj.pre_quant_scale",
        "model.layers.0.self_attn.o_proj.weight_zero_point",
        "model.layers.0.self_attn.o_proj.bias",
        "model.layers.3.eh_proj.weight",
        "x.model.layers.2.eh_proj.weight",
    ],
)
def test_what_would_change_the_result_is_not_skipped(name):
    checkpoint = checkpoint_of(BF16).add(name, "F32", 1)
    assert f"1 not expected: '{name}'" in refused(CheckpointDamaged, BF16, checkpoint)


def test_missing_and_left_over_tensors_are_listed_together_with_counts():
    checkpoint = checkpoint_of(BF16)
    for expert in range(5):
        name = f"model.layers.1.mlp.experts.{expert}.up_proj.weight"
        tensor = checkpoint.tensors.pop(name)
        checkpoint.add(name.replace("up_proj", "w3"), tensor.dtype, *tensor.shape)
    message = refused(CheckpointDamaged, BF16, checkpoint)
    assert "5 missing: 'model.layers.1.mlp.experts.0.up_proj.weight'" in message
    assert "5 not expected: 'model.layers.1.mlp.experts.0.w3.weight'" in message
    assert message.count("and 2 more") == 2


def tied_checkpoint(shape, dtype, change=None, rows=None):
    """One whose head is stored beside the embedding, equal but for one changed value."""
    checkpoint, rows = checkpoint_of(BF16), rows or shape[0]
    embedding = np.random.default_rng(0).integers(0, 2**16, (rows, shape[1]), np.uint16)
    head = embedding[: shape[0]].copy()
    if change is not None:
        head[change, 5] += 1
    checkpoint.add("model.embed_tokens.weight", "BF16", rows, shape[1], values=embedding)
    return checkpoint.add("lm_head.weight", dtype, *shape, values=head)


@pytest.mark.parametrize("rows", [512, 7])
def test_a_stored_head_that_repeats_the_embedding_is_skipped(rows):
    checkpoint = tied_checkpoint((rows, 96), "BF16")
    changes = {"tie_word_embeddings": True, "vocab_size": rows}
    bound = bind(BF16, checkpoint, **changes, bos_token_id=0, eos_token_id=1)
    assert len(bound) == 138 and not any(tensor.spec.role == "head" for tensor in bound)
    # It is a head of its own as soon as config.json says so.
    bound = bind(BF16, checkpoint, vocab_size=rows, bos_token_id=0, eos_token_id=1)
    assert bound[-1].data.name == "lm_head.weight"


@pytest.mark.parametrize(
    ("rows", "dtype", "change"),
    [(512, "BF16", np.s_[0]), (512, "BF16", np.s_[-1]), (512, "BF16", np.s_[100:300]),
     (50, "BF16", 31), (512, "F16", None)],
)  # fmt: skip
def test_a_tied_head_of_its_own_is_refused_with_what_to_set(rows, dtype, change):
    checkpoint = tied_checkpoint((rows, 96), dtype, change)
    changes = {"tie_word_embeddings": True, "vocab_size": rows}
    message = refused(
        CheckpointDamaged, BF16, checkpoint, **changes, bos_token_id=0, eos_token_id=1
    )
    assert "'lm_head.weight' is not the embedding" in message
    assert "Set tie_word_embeddings to false" in message


def test_a_tied_head_of_another_shape_is_left_over():
    checkpoint = tied_checkpoint((511, 96), "BF16", rows=512)
    changes = {"tie_word_embeddings": True, "vocab_size": 512}
    assert "1 not expected: 'lm_head.weight'" in refused(
        CheckpointDamaged, BF16, checkpoint, **changes
    )


def test_a_wrong_shape_names_tensor_and_both_shapes():
    message = refused(CheckpointDamaged, BF16, q_lora_rank=40)
    assert Q_A in message and "[48, 96]" in message and "[40, 96]" in message


def test_a_type_without_a_kernel_is_named():
    checkpoint = checkpoint_of(BF16).add(Q_A, "I8", 48, 96)
    message = refused(ArchitectureUnsupported, BF16, checkpoint)
    assert Q_A in message and "as I8" in message and "F32, F16, BF16, F8_E4M3" in message


def test_a_norm_cannot_be_fp8():
    checkpoint = checkpoint_of(BF16).add("model.norm.weight", "F8_E4M3", 96)
    assert "'model.norm.weight' as F8_E4M3" in refused(ArchitectureUnsupported, BF16, checkpoint)


def test_a_hostile_tensor_name_cannot_reach_the_terminal():
    checkpoint = checkpoint_of(BF16).add("\x1b[2J" * 1000, "F32", 1)
    message = refused(CheckpointDamaged, BF16, checkpoint)
    assert "\x1b" not in message and len(message) < 1000


def test_an_empty_checkpoint_lacks_everything():
    message = refused(
        CheckpointDamaged, BF16, FakeCheckpoint({"x": checkpoint_of(BF16).tensors[Q_A]})
    )
    assert "139 missing: 'model.embed_tokens.weight'" in message


def test_a_folder_without_config_is_no_model(tmp_path):
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        load_spec(tmp_path)
    with pytest.raises(ModelNotFound, match="no such folder"):
        load_spec(tmp_path / "gone")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["", "{", "[1]", "<html>"])
def test_damaged_configs_are_named(folder, name, text):
    (folder / name).write_text(text)
    with pytest.raises(CheckpointDamaged, match=name):
        load_spec(folder)


@pytest.mark.parametrize(
    "value", [["BloomForCausalLM"], [], None, "DeepseekV3ForCausalLM", [7], [["LlamaForCausalLM"]]]
)
def test_an_unknown_architecture_lists_what_is_implemented(folder, value):
    change_config(folder, architectures=value)
    with pytest.raises(ArchitectureUnsupported) as caught:
        load_spec(folder)
    assert repr(value) in caught.value.what and str(folder) in caught.value.what
    assert "implements DeepseekV2ForCausalLM, DeepseekV3ForCausalLM" in caught.value.why
    assert "Qwen3MoeForCausalLM" in caught.value.why


def test_an_architecture_that_its_model_type_contradicts_is_refused(folder):
    change_config(folder, architectures=["LlamaForCausalLM"])
    with pytest.raises(ArchitectureUnsupported, match="model_type = 'deepseek_v3'"):
        load_spec(folder)


def test_messages_name_the_config_that_was_read(folder):
    change_config(folder, hidden_size=-1)
    with pytest.raises(ArchitectureUnsupported, match="hidden_size = -1") as caught:
        load_spec(folder)
    assert str(folder / "config.json") in caught.value.what
    with pytest.raises(ArchitectureUnsupported, match=r"^x\.gguf has hidden_size"):
        read_spec(config_of(BF16) | {"hidden_size": 0}, {}, "x.gguf")


def test_generation_config_is_optional_and_adds_end_tokens(folder):
    change_config(folder, eos_token_id=1)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 1, 9]}')
    assert load_spec(folder).end_ids == (7, 1, 9)
    (folder / "generation_config.json").unlink()
    assert load_spec(folder).end_ids == (1,)


def test_a_damaged_end_token_in_generation_config_is_refused():
    with pytest.raises(ArchitectureUnsupported, match=r"generation_config\.json has eos_token_id"):
        read_spec(config_of(BF16), {"eos_token_id": 10**9})
