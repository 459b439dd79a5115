"""What each family may vary besides what its oracle has, and what of it is refused."""

import pytest
from fake_checkpoint import NAMES, config_of

from moechat.errors import ArchitectureUnsupported
from moechat.models.architectures import read_spec, tensor_table
from moechat.models.rope import inverse_frequencies

ABSENT = object()
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
FULL, SLIDING = "full_attention", "sliding_attention"


def changed(name, changes):
    return {key: value for key, value in (config_of(name) | changes).items() if value is not ABSENT}


def spec_with(name, **changes):
    return read_spec(changed(name, changes), {})


def roles_with(name, **changes):
    config = changed(name, changes)
    return {entry.role for entry in tensor_table(read_spec(config, {}), config)}


def windows(spec):
    return [layer.window for layer in spec.layers]


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_dense_qwens_slide_from_max_window_layers_on(name):
    assert windows(spec_with(name, **QWEN_WINDOW)) == [0, 64, 64]
    types = [SLIDING, FULL, SLIDING]
    assert windows(spec_with(name, **QWEN_WINDOW, layer_types=types)) == [64, 0, 64]
    assert windows(spec_with(name, sliding_window=64, layer_types=[FULL] * 3)) == [0, 0, 0]


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_dense_qwens_without_max_window_layers_slide_from_layer_28_on(name):
    slides = {"use_sliding_window": True, "sliding_window": 64, "num_hidden_layers": 30}
    spec = spec_with(name, **slides, max_window_layers=ABSENT)
    assert windows(spec) == [0] * 28 + [64] * 2
    types = [SLIDING] * 30
    spec = spec_with(name, **slides, max_window_layers=ABSENT, layer_types=types)
    assert windows(spec) == [64] * 30


@pytest.mark.parametrize("name", NAMES)
def test_settings_of_other_tasks_and_of_the_tokenizer_change_nothing(name):
    harmless = {
        "final_logit_softcapping": config_of(name).get("final_logit_softcapping"),
        "id2label": {"0": "LABEL_0"},
        "is_decoder": False,
        "label2id": {"LABEL_0": 0},
        "max_length": 20,
        "max_sequence_length": 4096,
        "return_dict": True,
        "sep_token_id": None,
        "some_feature": None,
        "tokenizer_class": "LlamaTokenizer",
        "torchscript": False,
        "unk_token_id": 0,
    }
    assert spec_with(name, **harmless) == spec_with(name)


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("qwen2", {"use_sliding_window": True, "sliding_window": None}, "sliding_window"),
        ("qwen2", {"layer_types": [FULL, FULL, SLIDING]}, "layer_types"),
        ("qwen2", {"layer_types": [FULL]}, "layer_types"),
        ("qwen2", {"layer_types": [FULL, FULL, "linear_attention"]}, "layer_types"),
        ("qwen2", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("qwen2", {"num_attention_heads": 3, "num_key_value_heads": 1}, "hidden_size"),
        ("qwen3", {"head_dim": 41}, "head_dim"),
        ("qwen3_moe", QWEN_WINDOW, "use_sliding_window"),
        ("qwen3_moe", {"layer_types": [SLIDING] * 3}, "layer_types"),
        ("qwen3_moe", {"num_local_experts": 13}, "num_local_experts"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 48}, "shared_expert"),
        ("qwen3_moe", {"num_experts": 4096, "num_hidden_layers": 1024}, "num_experts"),
        ("qwen3_moe", {"num_experts_per_tok": 15}, "num_experts_per_tok"),
        ("qwen2_moe", QWEN_WINDOW, "use_sliding_window"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert"),
        ("qwen2_moe", {"mlp_only_layers": 1}, "mlp_only_layers"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved"),
        ("llama", {"sliding_window": 16}, "sliding_window"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("mistral", {"sliding_window": 0}, "sliding_window"),
        ("mistral", {"layer_types": [FULL] * 3}, "layer_types"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation"),
        ("gemma2", {"hidden_act": "gelu"}, "hidden_act"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"sliding_window_size": 17}, "sliding_window_size"),
        ("gemma2", {"query_pre_attn_scalar": ABSENT}, "query_pre_attn_scalar"),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3_text", {"text_config": {}}, "text_config"),
        ("gemma3_text", {"vision_config": {}}, "vision_config"),
        ("gemma3_text", {"model_type": "gemma3"}, "model_type"),
        ("gemma3_text", {"_sliding_window_pattern": 6}, "_sliding_window_pattern"),
        ("gemma3_text", {"layer_types": [FULL] * 4}, "layer_types"),
        ("gemma3_text", {"rope_local_base_freq": 1}, "rope_local_base_freq"),
        ("glm4_moe", {"partial_rotary_factor": 0}, "partial_rotary_factor"),
        ("glm4_moe", {"partial_rotary_factor": 0.35}, "partial_rotary_factor"),
        ("glm4_moe", {"partial_rotary_factor": 0.01}, "partial_rotary_factor"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func"),
        ("glm4_moe", {"n_group": 3}, "n_group"),
        ("glm4_moe", {"n_group": 2, "topk_group": ABSENT}, "lacks topk_group"),
        ("glm4_moe", {"is_encoder_decoder": True}, "is_encoder_decoder"),
        ("deepseek_v3_bf16", {"n_group": ABSENT}, "lacks n_group"),
        ("deepseek_v3_bf16", {"n_group": None}, "n_group"),
        ("deepseek_v3_bf16", {"topk_group": ABSENT}, "lacks topk_group"),
        ("deepseek_v3_bf16", {"n_group": 1, "topk_group": ABSENT}, "lacks topk_group"),
        ("deepseek_v2_lite_group", {"n_group": ABSENT}, "lacks n_group"),
        ("deepseek_v2_lite_group", {"topk_group": ABSENT}, "lacks topk_group"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("gpt_oss_bf16", {"rope_scaling": None}, "rope_scaling"),
        ("gpt_oss_bf16", {"experts_per_token": 4}, "experts_per_token"),
        ("gpt_oss_bf16", {"sliding_window": None}, "sliding_window"),
        ("gpt_oss_bf16", {"swiglu_limit": -7.0}, "swiglu_limit"),
        ("olmoe", {"clip_qkv": 0}, "clip_qkv"),
        ("olmoe", {"sliding_window": 16}, "sliding_window"),
        ("deepseek_v2_lite_group", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek_v2_lite_group", {"topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek_v2_lite_group", {"scoring_func": "sigmoid"}, "scoring_func"),
        ("deepseek_v2_lite_group", {"n_group": 5}, "n_group"),
        ("deepseek_v2_lite_group", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ("deepseek_v2_lite_group", {"attention_bias": True}, "attention_bias"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(name, changes, key):
    with pytest.raises(ArchitectureUnsupported, match=key):
        spec_with(name, **changes)


def test_some_layers_of_qwen_moe_may_be_dense():
    def sparse(**changes):
        return [
            layer.moe for layer in spec_with("qwen2_moe", num_hidden_layers=6, **changes).layers
        ]

    assert sparse(decoder_sparse_step=2) == [False, True] * 3
    assert sparse(mlp_only_layers=[0, 4]) == [False, True, True, True, False, True]
    assert sparse(decoder_sparse_step=3, mlp_only_layers=[2]) == [False] * 5 + [True]
    roles = roles_with("qwen2_moe", mlp_only_layers=[0])
    assert "layers.0.gate" in roles and "layers.0.router" not in roles
    assert "layers.1.router" in roles and "layers.1.gate" not in roles


def test_newer_and_related_spellings_of_qwen3_moe():
    plain = spec_with("qwen3_moe")
    assert spec_with("qwen3_moe", num_experts=ABSENT, num_local_experts=14) == plain
    carried = {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0}
    assert spec_with("qwen3_moe", **carried) == plain


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe", "olmoe", "gemma2", "gemma3_text"])
def test_attention_bias_is_on_all_four_projections(name):
    added = roles_with(name, attention_bias=True) - roles_with(name)
    layers = config_of(name)["num_hidden_layers"]
    assert added == {f"layers.{i}.{part}_bias" for i in range(layers) for part in "qkvo"}


def test_biases_and_norms_of_other_families():
    added = roles_with("llama", mlp_bias=True) - roles_with("llama")
    parts = ("gate", "up", "down")
    assert added == {f"layers.{i}.{part}_bias" for i in range(3) for part in parts}
    gone = roles_with("glm4_moe") - roles_with("glm4_moe", use_qk_norm=False)
    assert gone == {f"layers.{i}.{part}_norm" for i in range(3) for part in "qk"}
    gone = roles_with("glm4_moe") - roles_with("glm4_moe", attention_bias=False)
    assert gone == {f"layers.{i}.{part}_bias" for i in range(3) for part in "qkv"}
    gone = roles_with("qwen2_moe") - roles_with("qwen2_moe", qkv_bias=False)
    assert gone == {f"layers.{i}.{part}_bias" for i in range(3) for part in "qkv"}


def test_the_key_that_old_llama_files_lack():
    spec = spec_with("llama", rope_theta=ABSENT, num_key_value_heads=ABSENT, head_dim=ABSENT)
    assert spec.ropes[0].inverse_frequencies == inverse_frequencies(16, 10000.0)
    assert spec.attention.num_kv_heads == 8


def test_windows_of_mistral_and_mixtral():
    assert windows(spec_with("mistral", sliding_window=ABSENT)) == [4096] * 3
    assert windows(spec_with("mixtral", sliding_window=ABSENT)) == [0] * 3
    assert windows(spec_with("mixtral", sliding_window=4096)) == [4096] * 3


def test_gemma2_without_keys_is_not_gemma2_with_null():
    keys = ("attn_logit_softcapping", "final_logit_softcapping")
    absent = spec_with("gemma2", **dict.fromkeys(keys, ABSENT))
    assert (absent.attention_softcap, absent.final_softcap) == (50.0, 30.0)
    null = spec_with("gemma2", **dict.fromkeys(keys))
    assert (null.attention_softcap, null.final_softcap) == (0.0, 0.0)
    assert spec_with("gemma3_text", final_logit_softcapping=ABSENT).final_softcap == 0.0
    types = [FULL, FULL, SLIDING, FULL]
    assert windows(spec_with("gemma2", layer_types=types)) == [0, 0, 16, 0]
    assert spec_with("gemma2", sliding_window_size=16) == spec_with("gemma2")
    assert spec_with("gemma2", tie_word_embeddings=False).tied_embeddings is False


def test_gemma3_has_a_rope_for_full_and_one_for_sliding_layers():
    spec = spec_with("gemma3_text")
    assert [layer.rope for layer in spec.layers] == [1, 1, 0, 1]
    full, local = (rope.inverse_frequencies for rope in spec.ropes)
    plain = inverse_frequencies(40, 1e6)
    assert full == tuple(frequency / 8.0 for frequency in plain)
    assert local == inverse_frequencies(40, 1e4)


def test_the_newer_style_of_gemma3_means_the_same():
    old = ("rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern")
    new = {
        **dict.fromkeys(old, ABSENT),
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING],
        "_sliding_window_pattern": 3,
        "rope_parameters": {
            FULL: {"factor": 8.0, "rope_theta": 1000000, "rope_type": "linear"},
            SLIDING: {"rope_theta": 10000, "rope_type": "default"},
        },
    }
    assert spec_with("gemma3_text", **new) == spec_with("gemma3_text")
    new["rope_parameters"] |= {"chunked_attention": {"rope_type": "default"}}
    with pytest.raises(ArchitectureUnsupported, match="'chunked_attention'"):
        spec_with("gemma3_text", **new)
    flat = new | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    with pytest.raises(ArchitectureUnsupported, match="'rope_theta', 'rope_type'"):
        spec_with("gemma3_text", **flat)


@pytest.mark.parametrize("key", ["rope_theta", "rope_local_base_freq", "rope_scaling"])
def test_gemma3s_two_styles_contradict(key):
    old = ("rope_theta", "rope_scaling", "rope_local_base_freq")
    both = dict.fromkeys(old, ABSENT) | {"rope_parameters": {}, key: config_of("gemma3_text")[key]}
    with pytest.raises(ArchitectureUnsupported, match=rf"{key} = .* a second time"):
        spec_with("gemma3_text", **both)


def test_gemma3_by_its_other_architecture_name_and_default_pattern():
    changes = {"architectures": ["Gemma3TextForCausalLM"], "sliding_window_pattern": ABSENT}
    spec = spec_with("gemma3_text", num_hidden_layers=7, **changes)
    assert windows(spec) == [16] * 5 + [0, 16]


def test_gpt_oss_rope_truncates_only_if_told():
    scaling = config_of("gpt_oss_bf16")["rope_scaling"]
    rope = spec_with("gpt_oss_bf16").ropes[0]
    told = spec_with("gpt_oss_bf16", rope_scaling=scaling | {"truncate": True}).ropes[0]
    assert rope.inverse_frequencies != told.inverse_frequencies
    assert rope.amplitude == told.amplitude


def test_gpt_oss_activation_and_experts():
    spec = spec_with("gpt_oss_bf16", swiglu_limit=5.0, num_experts_per_tok=ABSENT)
    assert (spec.activation_alpha, spec.activation_limit) == (1.702, 5.0)
    assert spec.moe.num_experts_per_token == 3
    config = config_of("gpt_oss_bf16")
    table = {entry.role: entry for entry in tensor_table(spec, config)}
    gate_up = table["layers.0.experts.*.gate_up"]
    assert gate_up.shape == (8, 96, 128) and gate_up.matrix
    assert gate_up.stacked and gate_up.transposed and gate_up.interleaved
    down = table["layers.0.experts.*.down"]
    assert down.shape == (8, 64, 96) and down.stacked and down.transposed and not down.interleaved
    bias = table["layers.0.experts.*.gate_up_bias"]
    assert bias.shape == (8, 128) and bias.stacked and bias.interleaved and not bias.transposed
    assert not (bias.matrix or table["layers.0.sinks"].matrix)


def test_olmoe_clips_and_norms_whole_rows():
    assert spec_with("olmoe", clip_qkv=8.0).attention.clip == 8.0
    assert spec_with("olmoe").attention.clip == 0.0
    config = changed("olmoe", {"num_key_value_heads": 2})
    table = {entry.role: entry.shape for entry in tensor_table(read_spec(config, {}), config)}
    assert (table["layers.0.q_norm"], table["layers.0.k_norm"]) == ((96,), (48,))


def test_glm_rotates_part_of_a_head_by_any_spelling():
    spec = spec_with("glm4_moe")
    assert spec.ropes[0].inverse_frequencies == inverse_frequencies(16, 1e6)
    assert spec_with("glm4_moe", partial_rotary_factor=ABSENT) == spec
    parameters = {"partial_rotary_factor": 0.5, "rope_theta": 1000000, "rope_type": "default"}
    old = dict.fromkeys(("partial_rotary_factor", "rope_theta", "rope_scaling"), ABSENT)
    assert spec_with("glm4_moe", **old, rope_parameters=parameters) == spec
    assert spec_with("glm4_moe", num_nextn_predict_layers=1).num_mtp_layers == 1


def test_greedy_deepseek_v2_ignores_its_groups():
    group, greedy = (
        spec_with("deepseek_v2_lite_group", topk_method=method).moe
        for method in ("group_limited_greedy", "greedy")
    )
    assert (group.num_groups, group.num_groups_kept) == (4, 2)
    assert (greedy.num_groups, greedy.num_groups_kept) == (1, 1)


def test_deepseek_v2_may_compress_its_queries():
    roles = roles_with("deepseek_v2_lite_group", q_lora_rank=32)
    assert {"layers.0.q_a", "layers.0.q_a_norm", "layers.0.q_b"} <= roles
    assert "layers.0.q" not in roles


def test_mixtral_names_its_experts_w1_w3_w2():
    config = config_of("mixtral")
    names = {entry.role: entry.name for entry in tensor_table(read_spec(config, {}), config)}
    prefix = "model.layers.0.block_sparse_moe.experts.3."
    assert [names[f"layers.0.experts.3.{part}"] for part in ("gate", "up", "down")] == [
        f"{prefix}{name}.weight" for name in ("w1", "w3", "w2")
    ]


def test_one_group_of_experts_is_what_glm_files_without_the_keys_mean():
    absent = {"n_group": ABSENT, "topk_group": ABSENT}
    assert spec_with("glm4_moe", **absent) == spec_with("glm4_moe")
    moe = spec_with("deepseek_v3_bf16", n_group=1, topk_group=1).moe
    assert (moe.num_groups, moe.num_groups_kept) == (1, 1)
    assert spec_with("deepseek_v2_lite_greedy", **absent) == spec_with("deepseek_v2_lite_greedy")
