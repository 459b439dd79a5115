"""Metadata of GGUF files, key by key. Whole models: test_gguf_families.py."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from moechat.errors import ArchitectureUnsupported, CheckpointDamaged
from moechat.models.gguf.config import read_spec
from moechat.models.spec import GroupedAttention, LatentAttention

DENSE = {
    "block_count": 4,
    "context_length": 2048,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
LATENT = {
    "attention.kv_lora_rank": 32,
    "attention.key_length": 48,
    "attention.value_length": 32,
    "attention.key_length_mla": 40,
    "attention.value_length_mla": 24,
    "rope.dimension_count": 16,
    "attention.head_count_kv": 1,
}
MOE = {
    "expert_count": 8,
    "expert_used_count": 2,
    "expert_feed_forward_length": 48,
}


def tensor(name, shape, values=None, dtype="F32"):
    return SimpleNamespace(name=name, dtype=dtype, shape=shape, array=values, file=Path("m.gguf"))


def spec(name, changes=None, general=None, tensors=(), base=DENSE):
    keys = {**base, **(changes or {})}
    metadata = {f"{name}.{key}": value for key, value in keys.items() if value is not None}
    metadata |= {"general.architecture": name, **(general or {})}
    stored = [tensor("token_embd.weight", (100, 64)), *tensors]
    return read_spec(SimpleNamespace(metadata=metadata, tensors={t.name: t for t in stored}))


def refused(*arguments, error=ArchitectureUnsupported, **settings):
    with pytest.raises(error) as caught:
        spec(*arguments, **settings)
    return caught.value.message


def test_a_dense_model():
    read = spec("llama")
    assert (read.hidden_size, read.vocab_size, read.num_heads) == (64, 100, 4)
    assert (read.intermediate_size, read.num_layers, read.context_tokens) == (96, 4, 2048)
    assert read.attention == GroupedAttention(num_kv_heads=2, head_dim=16)
    assert read.softmax_scale == 0.25 and read.rms_norm_eps == 1e-5
    assert read.tied_embeddings and read.moe is None and read.end_ids == ()
    assert read.ropes[0].interleaved and read.ropes[0].inverse_frequencies[1] == 10_000 ** (-1 / 8)
    assert not spec("qwen3").ropes[0].interleaved
    assert not spec("llama", tensors=[tensor("output.weight", (100, 64))]).tied_embeddings


def test_values_of_each_layer_must_agree():
    read = spec("llama", {"attention.head_count_kv": np.full(4, 2, np.int32)})
    assert read.attention.num_kv_heads == 2
    text = refused("llama", {"attention.head_count_kv": np.array([2, 4, 2, 2], np.int32)})
    assert "attention.head_count_kv = [2, 4, 2, 2]" in text


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("llama", {"block_count": None}, "lacks block_count"),
        ("llama", {"block_count": 0}, "block_count = 0"),
        ("llama", {"embedding_length": 2**31}, "embedding_length"),
        ("llama", {"attention.head_count_kv": 3}, "it must divide the 4 heads"),
        ("llama", {"attention.value_length": 8}, "attention.value_length = 8"),
        ("llama", {"rope.dimension_count": 3}, "an even number"),
        ("llama", {"rope.scaling.type": "longrope"}, "rope.scaling.type = 'longrope'"),
        ("llama", {"rope.scaling.factor": 0.5}, "rope.scaling.factor = 0.5"),
        ("llama", {"rope.scaling.attn_factor": 1.2}, "rope.scaling.attn_factor"),
        ("llama", {"rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor"),
        ("llama", {"attention.causal": False}, "attention.causal"),
        ("llama", {"attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon"),
        ("llama", {"logit_scale": 0.0625}, "does not know: 'logit_scale'"),
        ("qwen2", {"expert_count": 4}, "expert_count = 4"),
        ("qwen3moe", {}, "lacks expert_count"),
        ("qwen3moe", {**MOE, "expert_used_count": 9}, "expert_used_count = 9"),
        ("qwen3moe", {**MOE, "expert_group_count": 3}, "it must divide the 8 experts"),
        ("qwen3moe", {**MOE, "expert_group_count": 8}, "its two best"),
        ("qwen3moe", {**MOE, "expert_group_count": 2}, "lacks expert_group_used_count"),
        ("qwen3moe", {**MOE, "expert_gating_func": 4}, "expert_gating_func = 4"),
        ("deepseek2", {**LATENT, "rope.dimension_count": 40}, "must be even and below 40"),
        ("deepseek2", {**LATENT, "attention.head_count_kv": 2}, "attention.head_count_kv = 2"),
        ("gemma3", {"rope.scaling.yarn_log_multiplier": 0.1, "rope.scaling.type": "yarn"}, "log"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(name, changes, says):
    assert says in refused(name, changes)


def test_an_unknown_architecture_is_named_with_those_known():
    text = refused("mamba")
    assert "'mamba'" in text and "gemma2, gemma3, glm4moe, gpt-oss" in text
    assert "None" in refused("x", general={"general.architecture": None})


@pytest.mark.parametrize("shape", [(100,), (2, 50, 64)])
def test_a_file_without_an_embedding_is_damaged(shape):
    bad = tensor("token_embd.weight", shape)
    assert "token_embd.weight" in refused("llama", tensors=[bad], error=CheckpointDamaged)


def test_harmless_keys_are_passed_over():
    spec("llama", {"vocab_size": 100, "tensor_data_layout": "Meta AI original pth"})


def test_linear_scaling_divides_frequencies():
    plain = spec("llama").ropes[0].inverse_frequencies
    for keys in (
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {"rope.scale_linear": 4.0},  # of old files
    ):
        scaled = spec("llama", keys).ropes[0].inverse_frequencies
        assert scaled == tuple(frequency / 4 for frequency in plain)
    unscaled = spec("llama", {"rope.scaling.type": "none", "rope.scaling.factor": 4.0})
    assert unscaled.ropes[0].inverse_frequencies == plain


def test_rope_factors_divide_frequencies():
    plain = spec("llama").ropes[0].inverse_frequencies
    factors = np.array([1, 1, 2, 2, 4, 4, 8, 8], np.float32)
    read = spec("llama", tensors=[tensor("rope_freqs.weight", (8,), factors)])
    assert read.ropes[0].inverse_frequencies == tuple(
        frequency / factor for frequency, factor in zip(plain, factors.tolist())
    )
    assert read.ropes[0].interleaved


@pytest.mark.parametrize(
    "factors",
    [
        tensor("rope_freqs.weight", (7,), np.ones(7, np.float32)),
        tensor("rope_freqs.weight", (8,), np.ones(8, np.uint16), "F16"),
        tensor("rope_freqs.weight", (8,), np.zeros(8, np.float32)),
        tensor("rope_freqs.weight", (8,), np.full(8, np.nan, np.float32)),
    ],
)
def test_bad_rope_factors_are_refused(factors):
    assert "rope_freqs.weight" in refused("llama", tensors=[factors])


YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 8.0,
    "rope.scaling.original_context_length": 1024,
}


def test_yarn_stretches_the_context_and_grows_cos_and_sin():
    read = spec("qwen3", YARN)
    assert read.context_tokens == 8192
    assert read.ropes[0].amplitude == pytest.approx(0.1 * math.log(8) + 1)
    assert read.softmax_scale == 0.25
    given = spec("qwen3", {**YARN, "rope.scaling.yarn_attn_factor": 1.5})
    assert given.ropes[0].amplitude == 1.5


def test_yarn_of_deepseek_scales_scores_instead():
    multiplier = {"rope.scaling.yarn_log_multiplier": 0.0707}
    read = spec("deepseek2", {**LATENT, **YARN, **multiplier})
    assert read.ropes[0].amplitude == 1.0
    assert read.softmax_scale == pytest.approx(40**-0.5 * (1 + 0.0707 * math.log(8)) ** 2)


def test_latent_attention_of_new_and_old_files():
    expected = LatentAttention(
        q_lora_rank=20, kv_lora_rank=32, nope_dim=24, rope_dim=16, v_dim=24, norm_eps=1e-6
    )
    rank = {"attention.q_lora_rank": 20}
    assert spec("deepseek2", {**LATENT, **rank}).attention == expected
    old = {
        "attention.key_length": 40,
        "attention.value_length": 24,
        "attention.key_length_mla": None,
        "attention.value_length_mla": None,
        "attention.head_count_kv": 4,
    }
    read = spec("deepseek2", {**LATENT, **rank, **old})
    assert read.attention == expected and len(read.ropes[0].inverse_frequencies) == 8
    assert read.ropes[0].interleaved and read.softmax_scale == 40**-0.5


def test_windows_follow_the_architecture():
    def windows(*arguments):
        return [(layer.window, layer.rope) for layer in spec(*arguments).layers]

    assert windows("gemma2") == [(4096, 0), (0, 0)] * 2
    assert windows("gemma2", {"attention.sliding_window": 8}) == [(8, 0), (0, 0)] * 2
    assert windows("gemma3") == [(0, 0)] * 4
    long = {"block_count": 7, "attention.sliding_window": 8}
    assert windows("gemma3", long) == [(8, 1)] * 5 + [(0, 0), (8, 1)]
    every = {"attention.sliding_window": 8, "attention.sliding_window_pattern": 3}
    assert windows("gemma3", every) == [(8, 1), (8, 1), (0, 0), (8, 1)]
    listed = {**every, "attention.sliding_window_pattern": np.array([False, True, True, True])}
    assert windows("gemma3", listed) == [(0, 0), (8, 1), (8, 1), (8, 1)]
    assert windows("llama", {"attention.sliding_window": 8}) == [(8, 0)] * 4
    short = {**every, "attention.sliding_window_pattern": np.array([True])}
    assert "1 entries" in refused("gemma3", short)


def test_gemma_3_has_another_rope_in_windows():
    keys = {
        "attention.sliding_window": 8,
        "rope.freq_base": 1e6,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
    }
    everywhere, in_windows = spec("gemma3", keys).ropes
    assert everywhere.inverse_frequencies[1] == 1e6 ** (-1 / 8) / 8
    assert in_windows.inverse_frequencies[1] == 1e4 ** (-1 / 8)
    _, stated = spec("gemma3", {**keys, "rope.freq_base_swa": 5e4}).ropes
    assert stated.inverse_frequencies[1] == 5e4 ** (-1 / 8)


def test_gemma_scales_embeddings_scores_and_logits():
    read = spec("gemma2")
    assert (read.attention_softcap, read.final_softcap) == (50.0, 30.0)
    assert read.embedding_scale == 8.0 and read.activation == "gelu_tanh"
    assert read.softmax_scale == 0.25
    capped = spec("gemma2", {"attn_logit_softcapping": 8.0, "final_logit_softcapping": 12.0})
    assert (capped.attention_softcap, capped.final_softcap) == (8.0, 12.0)
    assert (spec("gemma3").attention_softcap, spec("gemma3").final_softcap) == (0.0, 0.0)
    assert spec("gemma3", {"attention.scale": 0.5}).softmax_scale == 0.5
    # 27B: by hidden size over heads, though its heads are smaller
    large = {"attention.key_length": 8, "attention.value_length": 8}
    assert spec("gemma2", {**large, "block_count": 46}).softmax_scale == 0.25
    assert spec("gemma3", {**large, "block_count": 62}).softmax_scale == 0.25
    assert spec("gemma3", {**large, "block_count": 46}).softmax_scale == 8**-0.5


def test_experts():
    read = spec("qwen3moe", MOE)
    moe = read.moe
    assert (moe.num_experts, moe.num_experts_per_token, moe.intermediate_size) == (8, 2, 48)
    assert moe.scoring == "softmax" and moe.normalise_weights and moe.shared_intermediate_size == 0
    assert [layer.moe for layer in read.layers] == [True] * 4
    assert not spec("qwen3moe", {**MOE, "expert_weights_norm": False}).moe.normalise_weights
    mixtral = spec("llama", {"expert_count": 8, "expert_used_count": 2}).moe
    assert mixtral.intermediate_size == 96 and mixtral.normalise_weights
    shared = {**MOE, "expert_shared_feed_forward_length": 80}
    assert spec("qwen2moe", shared).moe.shared_intermediate_size == 80
    assert spec("gpt-oss", {**MOE, "attention.sliding_window": 8}).moe.scoring == "softmax_chosen"


def test_experts_of_deepseek():
    keys = {
        **LATENT,
        **MOE,
        "expert_gating_func": 2,
        "expert_group_count": 4,
        "expert_group_used_count": 2,
        "expert_shared_count": 2,
        "expert_weights_scale": 2.5,
        "expert_weights_norm": True,
        "leading_dense_block_count": 1,
    }
    read = spec("deepseek2", keys)
    moe = read.moe
    assert moe.scoring == "sigmoid" and moe.normalise_weights and moe.routed_scaling == 2.5
    assert (moe.num_groups, moe.num_groups_kept) == (4, 2)
    assert moe.shared_intermediate_size == 96
    assert [layer.moe for layer in read.layers] == [False, True, True, True]
    # files that do not state the scoring
    unstated = {**keys, "expert_gating_func": None}
    correction = tensor("blk.1.exp_probs_b.bias", (8,))
    assert spec("deepseek2", unstated).moe.scoring == "softmax"
    assert spec("deepseek2", unstated, tensors=[correction]).moe.scoring == "sigmoid"


def test_groups_that_early_files_of_deepseek_omit():
    keys = {
        **LATENT,
        **MOE,
        "block_count": 61,
        "embedding_length": 7168,
        "expert_count": 256,
        "expert_used_count": 8,
    }
    moe = spec("deepseek2", keys).moe
    assert (moe.num_groups, moe.num_groups_kept) == (8, 4)
    other = spec("deepseek2", {**keys, "block_count": 60}).moe
    assert (other.num_groups, other.num_groups_kept) == (1, 1)


def test_multi_token_prediction_layers_do_not_count():
    read = spec("glm4moe", {**MOE, "nextn_predict_layers": 1})
    assert read.num_layers == 3 and read.num_mtp_layers == 1
    assert read.moe.scoring == "sigmoid"
    assert "block_count" in refused("glm4moe", {**MOE, "nextn_predict_layers": 4})


def test_end_tokens():
    tokens = ["a", "<|im_end|>", "</s>", "<|endoftext|>", "<|end|>", "<|return|>"]
    types = np.array([1, 3, 1, 3, 3, 3], np.int32)
    general = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 1000,  # of nothing
    }
    read = spec("llama", general=general)
    assert read.bos_id == 2
    assert read.end_ids == (3, 1, 4, 5)  # "</s>" is a word here
    harmony = {**general, "tokenizer.ggml.tokens": [*tokens, "<|call|>"]}
    harmony["tokenizer.ggml.token_type"] = np.append(types, 3)
    assert spec("llama", general=harmony).end_ids == (3, 1, 5, 6)
    assert spec("llama", general={"tokenizer.ggml.eos_token_id": -1}).end_ids == ()


@pytest.mark.parametrize("key", ["tokens", "token_type", "eos_token_id", "bos_token_id"])
@pytest.mark.parametrize("value", [5, "</s>", np.array([1, 2]), ["</s>"], 1.5])
def test_nonsense_about_tokens_does_no_harm_to_the_spec(key, value):
    tokens = {
        "tokenizer.ggml.tokens": ["</s>"],
        "tokenizer.ggml.token_type": np.array([3], np.int32),
    }
    spec("llama", general={**tokens, f"tokenizer.ggml.{key}": value})
