import json
import math
from pathlib import Path

import pytest

from moechat.errors import ArchitectureUnsupported
from moechat.models.architectures import read_spec

ORACLE = Path(__file__).parents[3] / "fixtures/oracle"
ABSENT = object()


@pytest.fixture
def config():
    return json.loads((ORACLE / "deepseek_v3_fp8_256/config.json").read_text())


def changed(config, changes):
    return {key: value for key, value in (config | changes).items() if value is not ABSENT}


def test_every_dimension_is_read(config):
    spec = read_spec(config, {})
    assert (spec.architecture, spec.hidden_size, spec.vocab_size) == ("deepseek_v3", 256, 512)
    assert (spec.num_layers, spec.num_heads, spec.intermediate_size) == (3, 8, 256)
    assert [layer.moe for layer in spec.layers] == [False, True, True]
    sizes = spec.attention
    assert (sizes.q_lora_rank, sizes.kv_lora_rank) == (256, 112)
    assert (sizes.nope_dim, sizes.rope_dim, sizes.v_dim, sizes.kv_width) == (16, 16, 32, 128)
    moe = spec.moe
    assert (moe.num_experts, moe.num_experts_per_token) == (8, 3)
    assert (moe.intermediate_size, moe.shared_intermediate_size) == (128, 128)
    assert (moe.scoring, moe.num_groups, moe.num_groups_kept) == ("sigmoid", 4, 2)
    assert moe.normalise_weights is True and moe.routed_scaling == 2.5
    assert (spec.rms_norm_eps, sizes.norm_eps) == (1e-6, 1e-6)
    assert (spec.context_tokens, spec.tied_embeddings, spec.num_mtp_layers) == (163840, False, 0)
    assert (spec.bos_id, spec.end_ids) == (0, (1,))
    (rope,) = spec.ropes
    assert (len(rope.inverse_frequencies), rope.amplitude, rope.interleaved) == (8, 1.0, True)


def test_the_latent_norms_ignore_rms_norm_eps(config):
    spec = read_spec(config | {"rms_norm_eps": 1e-5}, {})
    assert (spec.rms_norm_eps, spec.attention.norm_eps) == (1e-5, 1e-6)


def test_kimi_k2_and_moonlight_are_variants_of_sizes(config):
    kimi = {"model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827}
    spec = read_spec(config | kimi, {})
    assert (spec.moe.num_groups, spec.moe.routed_scaling) == (1, 2.827)
    moonlight = {"rope_scaling": None, "q_lora_rank": None, "n_shared_experts": 2}
    spec = read_spec(config | moonlight, {})
    assert (spec.attention.q_lora_rank, spec.moe.shared_intermediate_size) == (0, 256)
    assert spec.softmax_scale == pytest.approx(32**-0.5, rel=1e-14)


def test_softmax_scale_of_deepseek_v3(config):
    spec = read_spec(config | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}, {})
    assert spec.softmax_scale == pytest.approx(0.13523, abs=5e-6)
    plain = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rope_scaling": None}
    spec = read_spec(config | plain, {})
    assert spec.softmax_scale == pytest.approx(192**-0.5, rel=1e-15)
    assert spec.ropes[0].inverse_frequencies[1] == pytest.approx(1e4 ** (-1 / 32), rel=1e-15)


def test_the_newer_style_of_config_means_the_same(config):
    parameters = changed(
        config["rope_scaling"], {"type": ABSENT, "rope_type": "yarn", "rope_theta": 10000.0}
    )
    new = {
        "rope_scaling": ABSENT,
        "rope_theta": ABSENT,
        "rope_parameters": parameters,
        "torch_dtype": ABSENT,
        "dtype": "bfloat16",
    }
    assert read_spec(changed(config, new), {}) == read_spec(config, {})


def test_a_base_given_twice_must_agree(config):
    parameters = changed(config["rope_scaling"], {"rope_theta": 50000.0})
    both = changed(config, {"rope_scaling": ABSENT, "rope_parameters": parameters})
    with pytest.raises(ArchitectureUnsupported, match=r"rope_theta = 10000: .* 50000"):
        read_spec(both, {})


def test_default_rope_parameters_are_plain_rope(config):
    new = {
        "rope_scaling": ABSENT,
        "rope_theta": ABSENT,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000},
    }
    old = {"rope_scaling": None, "rope_theta": 50000}
    assert read_spec(changed(config, new), {}) == read_spec(config | old, {})


def test_what_may_be_left_out(config):
    left_out = (
        "attention_bias hidden_act model_type moe_layer_freq num_key_value_heads scoring_func "
        "topk_method torch_dtype num_nextn_predict_layers tie_word_embeddings quantization_config"
    )
    assert read_spec(changed(config, dict.fromkeys(left_out.split(), ABSENT)), {}) == read_spec(
        config, {}
    )


@pytest.mark.parametrize("value", [None, ABSENT, 0])
def test_no_query_compression(config, value):
    assert read_spec(changed(config, {"q_lora_rank": value}), {}).attention.q_lora_rank == 0


def test_end_ids_of_both_files_without_repeats(config):
    both = read_spec(config | {"eos_token_id": [5, 6]}, {"eos_token_id": [7, 5], "top_p": 0.9})
    assert both.end_ids == (7, 5, 6)
    none = read_spec(config | {"eos_token_id": None, "bos_token_id": None}, {})
    assert (none.end_ids, none.bos_id) == ((), None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scoring_func", "softmax"),
        ("topk_method", "group_limited_greedy"),
        ("moe_layer_freq", 2),
        ("moe_layer_freq", True),
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("rope_interleave", False),
        ("model_type", "deepseek_v2"),
        ("head_dim", 64),
        ("qk_head_dim", 33),
        ("num_key_value_heads", 4),
        ("hidden_size", 0),
        ("hidden_size", -256),
        ("hidden_size", 256.0),
        ("hidden_size", "256"),
        ("hidden_size", True),
        ("hidden_size", 2**40),
        ("num_hidden_layers", 10**9),
        ("n_routed_experts", 10**9),
        ("vocab_size", 2**31),
        ("qk_rope_head_dim", 15),
        ("q_lora_rank", -1),
        ("first_k_dense_replace", 4),
        ("n_shared_experts", 0),
        ("n_group", 3),
        ("n_group", 8),
        ("topk_group", 5),
        ("num_experts_per_tok", 5),
        ("num_experts_per_tok", 0),
        ("norm_topk_prob", 1),
        ("routed_scaling_factor", math.nan),
        ("routed_scaling_factor", math.inf),
        ("routed_scaling_factor", -2.5),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", "1e-6"),
        ("rope_theta", 1),
        ("rope_theta", 0),
        ("eos_token_id", 512),
        ("eos_token_id", [1, -1]),
        ("bos_token_id", "0"),
        ("rope_scaling", "yarn"),
        ("rope_parameters", {"rope_type": "default"}),
        ("max_position_embeddings", 0),
        ("num_nextn_predict_layers", -1),
        ("tie_word_embeddings", 0),
        ("quantization_config", "fp8"),
    ],
)
def test_unsupported_values_are_refused_by_name(config, key, value):
    with pytest.raises(ArchitectureUnsupported) as caught:
        read_spec(config | {key: value}, {})
    assert caught.value.exit_code == 3
    blamed = "rope_scaling" if key == "rope_parameters" else key
    assert f"config.json has {blamed} = " in caught.value.what


def test_experts_are_bounded_in_all_not_only_a_layer(config):
    changes = {"num_hidden_layers": 1024, "n_routed_experts": 4096}
    with pytest.raises(ArchitectureUnsupported, match="experts in all"):
        read_spec(config | changes, {})


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "vocab_size",
        "num_hidden_layers",
        "num_attention_heads",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "intermediate_size",
        "moe_intermediate_size",
        "n_routed_experts",
        "num_experts_per_tok",
        "n_shared_experts",
        "first_k_dense_replace",
        "norm_topk_prob",
        "routed_scaling_factor",
        "rms_norm_eps",
        "rope_theta",
        "max_position_embeddings",
    ],
)
def test_required_keys_are_named_when_they_are_missing(config, key):
    del config[key]
    with pytest.raises(ArchitectureUnsupported, match=rf"config\.json lacks {key}"):
        read_spec(config, {})


def test_unknown_keys_are_refused_by_name(config):
    with pytest.raises(ArchitectureUnsupported, match="'attention_sink'"):
        read_spec(config | {"attention_sink": True}, {})


def test_keys_without_influence_are_accepted(config):
    harmless = {"auto_map": {}, "_name_or_path": "x", "pad_token_id": 2, "aux_loss_alpha": 0.001}
    assert read_spec(config | harmless, {}) == read_spec(config, {})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quant_method", "bitsandbytes"),
        ("quant_method", ABSENT),
        ("fmt", "e5m2"),
        ("weight_block_size", [64]),
        ("bits", 4),
    ],
)
def test_other_quantizations_are_refused(config, key, value):
    config["quantization_config"] = changed(config["quantization_config"], {key: value})
    with pytest.raises(ArchitectureUnsupported) as caught:
        read_spec(config, {})
    assert key in caught.value.message and "quantization_config" in caught.value.message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("type", "longrope"),
        ("type", ABSENT),
        ("rope_type", "llama3"),
        ("factor", 0.5),
        ("factor", "40"),
        ("factor", math.nan),
        ("factor", ABSENT),
        ("original_max_position_embeddings", 0),
        ("original_max_position_embeddings", ABSENT),
        ("beta_fast", 0.5),
        ("beta_slow", 0),
        ("mscale", -1.0),
        ("truncate", False),
        ("attention_factor", 1.0),
    ],
)
def test_other_scalings_are_refused(config, key, value):
    config["rope_scaling"] = changed(config["rope_scaling"], {key: value})
    with pytest.raises(ArchitectureUnsupported) as caught:
        read_spec(config, {})
    assert key in caught.value.message and "rope_scaling" in caught.value.message


def test_a_hostile_value_cannot_flood_the_message(config):
    with pytest.raises(ArchitectureUnsupported) as caught:
        read_spec(config | {"hidden_act": "\x1b[2J" * 10_000}, {})
    assert "\x1b" not in caught.value.message and len(caught.value.message) < 300
