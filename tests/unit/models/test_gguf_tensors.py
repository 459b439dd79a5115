"""Tensors by GGUF's names: the tables, and how stored tensors are matched with them."""

from pathlib import Path
from types import SimpleNamespace

import gguf_writer as w
import numpy as np
import pytest

from moechat.errors import ArchitectureUnsupported, CheckpointDamaged
from moechat.models.gguf.bind import bind_tensors
from moechat.models.gguf.config import read_spec
from moechat.models.gguf.names import tensor_table
from moechat.models.gguf.traits import ARCHITECTURES
from moechat.weights.gguf_file import GGUFCheckpoint

# Every size another, so that a mix-up shows.
KEYS = {
    "block_count": 2,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "leading_dense_block_count": 1,
    "expert_count": 3,
    "expert_used_count": 2,
    "expert_feed_forward_length": 160,
}
LATENT = {
    "attention.head_count_kv": 1,
    "attention.q_lora_rank": 64,
    "attention.kv_lora_rank": 128,
    "attention.key_length_mla": 48,
    "attention.value_length_mla": 40,
    "rope.dimension_count": 16,
    "expert_shared_count": 2,
    "expert_gating_func": 2,
}
DENSE = ("qwen2", "qwen3", "gemma2", "gemma3")


def source(name, changes=None, names=()):
    keys = {key: value for key, value in KEYS.items() if name not in DENSE or "expert" not in key}
    metadata = {f"{name}.{key}": value for key, value in {**keys, **(changes or {})}.items()}
    metadata["general.architecture"] = name
    stored = {key: SimpleNamespace(name=key, shape=(7, 32)) for key in ("output.weight", *names)}
    stored["token_embd.weight"] = SimpleNamespace(name="token_embd.weight", shape=(7, 32))
    return SimpleNamespace(metadata=metadata, tensors=stored)


def table(name, changes=None, names=()):
    """Role: name and shape, of the whole model's tensors and of layer 1 (without "layers.1.")."""
    read_from = source(name, changes, names)
    entries = tensor_table(read_spec(read_from), ARCHITECTURES[name], read_from.tensors)
    assert len({entry.role for entry in entries}) == len(entries)
    return {
        entry.role.removeprefix("layers.1."): (entry.name.removeprefix("blk.1."), *entry.shape)
        for entry in entries
        if not entry.role.startswith("layers.0.")
    }


GROUPED = {
    "embedding": ("token_embd.weight", 7, 32),
    "attention_norm": ("attn_norm.weight", 32),
    "q": ("attn_q.weight", 64, 32),
    "k": ("attn_k.weight", 32, 32),
    "v": ("attn_v.weight", 32, 32),
    "o": ("attn_output.weight", 32, 64),
    "ffn_norm": ("ffn_norm.weight", 32),
    "final_norm": ("output_norm.weight", 32),
    "head": ("output.weight", 7, 32),
}
QKV_BIAS = {
    "q_bias": ("attn_q.bias", 64),
    "k_bias": ("attn_k.bias", 32),
    "v_bias": ("attn_v.bias", 32),
}
HEAD_NORMS = {"q_norm": ("attn_q_norm.weight", 16), "k_norm": ("attn_k_norm.weight", 16)}
ROW_NORMS = {"q_norm": ("attn_q_norm.weight", 64), "k_norm": ("attn_k_norm.weight", 32)}
MLP = {
    "gate": ("ffn_gate.weight", 96, 32),
    "up": ("ffn_up.weight", 96, 32),
    "down": ("ffn_down.weight", 32, 96),
}
EXPERTS = {
    "router": ("ffn_gate_inp.weight", 3, 32),
    "experts.*.gate": ("ffn_gate_exps.weight", 3, 160, 32),
    "experts.*.up": ("ffn_up_exps.weight", 3, 160, 32),
    "experts.*.down": ("ffn_down_exps.weight", 3, 32, 160),
}
SHARED = {
    "shared.gate": ("ffn_gate_shexp.weight", 320, 32),
    "shared.up": ("ffn_up_shexp.weight", 320, 32),
    "shared.down": ("ffn_down_shexp.weight", 32, 320),
}
CORRECTION = {"router_correction": ("exp_probs_b.bias", 3)}
SANDWICH = {
    "post_attention_norm": ("post_attention_norm.weight", 32),
    "post_ffn_norm": ("post_ffw_norm.weight", 32),
}


def test_dense_models():
    plain = {"expert_count": 0, "expert_used_count": 0}
    assert table("llama", plain) == {**GROUPED, **MLP}
    assert table("qwen2") == {**GROUPED, **QKV_BIAS, **MLP}
    assert table("qwen3") == {**GROUPED, **HEAD_NORMS, **MLP}
    assert table("gemma2") == {**GROUPED, **SANDWICH, **MLP}
    assert table("gemma3") == {**GROUPED, **HEAD_NORMS, **SANDWICH, **MLP}


def test_models_with_experts():
    assert table("llama") == {**GROUPED, **EXPERTS}
    assert table("qwen3moe") == {**GROUPED, **HEAD_NORMS, **EXPERTS}
    assert table("olmoe") == {**GROUPED, **ROW_NORMS, **EXPERTS}
    shared = {"expert_shared_feed_forward_length": 320}
    gate = {"shared_gate": ("ffn_gate_inp_shexp.weight", 1, 32)}
    assert table("qwen2moe", shared) == {**GROUPED, **QKV_BIAS, **EXPERTS, **SHARED, **gate}


def test_what_is_called_a_post_norm_may_be_the_ffn_norm():
    renamed = {"ffn_norm": ("post_attention_norm.weight", 32)}
    assert table("glm4moe", {"expert_shared_count": 2}) == (
        GROUPED | renamed | EXPERTS | SHARED | CORRECTION
    )
    biases = {
        "o_bias": ("attn_output.bias", 32),
        "sinks": ("attn_sinks.weight", 4),
        "router_bias": ("ffn_gate_inp.bias", 3),
        "experts.*.gate_bias": ("ffn_gate_exps.bias", 3, 160),
        "experts.*.up_bias": ("ffn_up_exps.bias", 3, 160),
        "experts.*.down_bias": ("ffn_down_exps.bias", 3, 32),
    }
    assert table("gpt-oss", {"attention.sliding_window": 8}) == (
        GROUPED | renamed | QKV_BIAS | EXPERTS | biases
    )


def test_latent_attention_in_halves_or_whole():
    latent = {
        "q_a": ("attn_q_a.weight", 64, 32),
        "q_a_norm": ("attn_q_a_norm.weight", 64),
        "q_b": ("attn_q_b.weight", 192, 64),
        "kv_a": ("attn_kv_a_mqa.weight", 144, 32),
        "kv_a_norm": ("attn_kv_a_norm.weight", 128),
        "o": ("attn_output.weight", 32, 160),
    }
    halves = {
        "k_b.*": ("attn_k_b.weight", 4, 128, 32),
        "v_b.*": ("attn_v_b.weight", 4, 40, 128),
    }
    rest = {key: GROUPED[key] for key in GROUPED if key not in ("q", "k", "v", "o")}
    rest |= EXPERTS | SHARED | CORRECTION
    assert table("deepseek2", LATENT) == latent | halves | rest
    whole = {"kv_b": ("attn_kv_b.weight", 288, 128)}
    names = ["blk.0.attn_kv_b.weight", "blk.1.attn_kv_b.weight"]
    assert table("deepseek2", LATENT, names) == latent | whole | rest
    direct = table("deepseek2", {**LATENT, "attention.q_lora_rank": 0})
    assert direct["q"] == ("attn_q.weight", 192, 32) and "q_a" not in direct


def test_flags_say_how_tensors_are_stored():
    read_from = source("deepseek2", LATENT)
    entries = {
        entry.role: entry
        for entry in tensor_table(
            read_spec(read_from), ARCHITECTURES["deepseek2"], read_from.tensors
        )
    }
    keys = entries["layers.1.k_b.*"]
    assert keys.matrix and keys.stacked and keys.transposed and keys.added == 0
    values = entries["layers.1.v_b.*"]
    assert values.matrix and values.stacked and not values.transposed
    assert entries["layers.1.experts.*.down"].stacked
    assert not entries["layers.1.router"].matrix and not entries["final_norm"].matrix
    assert entries["embedding"].matrix and entries["layers.0.gate"].matrix


def test_optional_tensors_are_used_when_they_are_there():
    plain = {"expert_count": 0, "expert_used_count": 0}
    names = [f"blk.1.attn_{part}.bias" for part in ("q", "k", "v", "output")]
    biases = {**QKV_BIAS, "o_bias": ("attn_output.bias", 32)}
    assert table("llama", plain, names) == {**GROUPED, **biases, **MLP}
    names = [f"blk.1.attn_{part}_norm.weight" for part in ("q", "k")]
    assert HEAD_NORMS.items() <= table("glm4moe", None, names).items()


def stored_tensors(name="qwen2", changes=None):
    read_from = source(name, changes)
    entries = tensor_table(read_spec(read_from), ARCHITECTURES[name], read_from.tensors)
    return {entry.name: np.zeros(entry.shape, np.float32) for entry in entries}


@pytest.fixture
def bind(tmp_path):
    def bind_(tensors, name="qwen2", changes=None):
        path = tmp_path / "m.gguf"
        path.write_bytes(w.gguf_bytes(source(name, changes).metadata, tensors))
        checkpoint = GGUFCheckpoint.open([path])
        return {bound.spec.role: bound for bound in bind_tensors(read_spec(checkpoint), checkpoint)}

    return bind_


def test_formats_follow_the_stored_types(bind):
    tensors = stored_tensors()
    tensors["blk.0.attn_q.weight"] = w.Blocks("Q8_0", (64, 32), np.zeros((64, 34), np.uint8))
    tensors["blk.0.ffn_up.weight"] = w.Blocks("MXFP4", (96, 32), np.zeros((96, 17), np.uint8))
    tensors["blk.0.ffn_gate.weight"] = w.bf16(tensors["blk.0.ffn_gate.weight"])
    tensors["output_norm.weight"] = tensors["output_norm.weight"].astype(np.float16)
    bound = bind(tensors)
    assert bound["layers.0.q"].format == "q8_0" and bound["layers.0.up"].format == "mxfp4_block"
    assert bound["layers.0.gate"].format == "bf16" and bound["layers.0.down"].format == "f32"
    assert bound["final_norm"].format == "f16"
    assert bound["layers.0.q"].data.array.shape == (64, 34)
    assert len(bound) == len(tensors)


def test_dimensions_of_size_one_may_be_missing(bind):
    changes = {"expert_shared_feed_forward_length": 320, "expert_count": 1, "expert_used_count": 1}
    tensors = stored_tensors("qwen2moe", changes)
    values = np.arange(32, dtype=np.float32)
    tensors["blk.1.ffn_gate_inp_shexp.weight"] = values
    blocks = w.Blocks("Q8_0", (160, 32), np.arange(160 * 34, dtype=np.uint8).reshape(160, 34))
    tensors["blk.1.ffn_up_exps.weight"] = blocks
    bound = bind(tensors, "qwen2moe", changes)
    gate = bound["layers.1.shared_gate"].data
    assert gate.shape == (1, 32) and gate.array.tolist() == [values.tolist()]
    up = bound["layers.1.experts.*.up"].data
    assert up.shape == (1, 160, 32) and up.array.shape == (1, 160, 34)
    assert (up.array[0] == blocks.data).all()


def test_missing_and_left_over_tensors_are_listed(bind):
    tensors = stored_tensors()
    del tensors["blk.1.attn_q.bias"]
    tensors["blk.1.attn_qkv.weight"] = np.zeros((3, 2), np.float32)
    tensors["blk.2.attn_q.bias"] = np.zeros(3, np.float32)
    with pytest.raises(CheckpointDamaged) as caught:
        bind(tensors)
    assert "1 missing: 'blk.1.attn_q.bias'" in caught.value.why
    assert "2 not expected: 'blk.1.attn_qkv.weight', 'blk.2.attn_q.bias'" in caught.value.why


def test_multi_token_prediction_layers_and_used_up_factors_are_skipped(bind):
    changes = {"nextn_predict_layers": 1, "block_count": 3}
    tensors = stored_tensors("glm4moe", changes)
    tensors["blk.2.nextn.eh_proj.weight"] = np.zeros((2, 2), np.float32)
    tensors["blk.2.attn_q.weight"] = np.zeros((2, 2), np.float32)
    assert len(bind(tensors, "glm4moe", changes)) == len(tensors) - 2
    tensors["blk.3.attn_q.weight"] = np.zeros((2, 2), np.float32)
    with pytest.raises(CheckpointDamaged, match=r"blk\.3"):
        bind(tensors, "glm4moe", changes)
    llama = stored_tensors("llama")
    llama["rope_freqs.weight"] = np.ones(8, np.float32)
    assert len(bind(llama, "llama")) == len(llama) - 1
    qwen = stored_tensors()
    qwen["rope_freqs.weight"] = np.ones(8, np.float32)
    with pytest.raises(CheckpointDamaged, match="rope_freqs"):
        bind(qwen)


def test_kv_b_whole_is_preferred_to_its_halves(bind):
    keys = {**KEYS, **LATENT}
    tensors = stored_tensors("deepseek2", keys)
    for layer in range(2):
        tensors[f"blk.{layer}.attn_kv_b.weight"] = np.zeros((288, 128), np.float32)
    bound = bind(tensors, "deepseek2", keys)
    assert "layers.1.kv_b" in bound and "layers.1.k_b.*" not in bound


def test_misshapen_tensors_are_named(bind):
    tensors = stored_tensors()
    tensors["blk.1.attn_k.weight"] = np.zeros((64, 32), np.float32)
    with pytest.raises(CheckpointDamaged, match=r"shape \[64, 32\] and should have \[32, 32\]"):
        bind(tensors)


@pytest.mark.parametrize(
    ("name", "blocks", "says"),
    [
        ("blk.1.attn_k.weight", w.Blocks("Q5_1", (32, 32), np.zeros((32, 24), np.uint8)), "q4_k"),
        ("output_norm.weight", w.Blocks("Q8_0", (32,), np.zeros(34, np.uint8)), "F32, F16, BF16"),
    ],
)  # fmt: skip
def test_types_without_a_kernel_are_named(bind, name, blocks, says):
    tensors = stored_tensors()
    tensors[name] = blocks
    with pytest.raises(ArchitectureUnsupported, match=says.upper()) as caught:
        bind(tensors)
    assert name in caught.value.what and blocks.dtype in caught.value.what
    assert str(Path("m.gguf")) in caught.value.what
