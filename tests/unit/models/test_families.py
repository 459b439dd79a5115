import math
from pathlib import Path

import pytest
from fake_checkpoint import NAMES, checkpoint_of, config_of, generation_of

import moechat.models
from moechat.errors import ArchitectureUnsupported
from moechat.models.architectures import bind_tensors, read_spec, tensor_table
from moechat.models.spec import LatentAttention

# What each folder exercises, as its README states it; anything not named here has its default.
DEFAULTS = {
    "windows": None,
    "moe_layers": (),
    "ends": (1,),
    "bos": 0,
    "tied": False,
    "activation": "silu",
    "attention_softcap": 0.0,
    "final_softcap": 0.0,
    "embedding_scale": 1.0,
    "amplitude": 1.0,
    "mtp": 0,
}
M40, M4 = 0.1 * math.log(40) + 1, 0.1 * math.log(4) + 1
M707 = 0.0707 * math.log(40) + 1
M32 = 0.1 * math.log(32) + 1
GEMMA = {"bos": 2, "tied": True, "activation": "gelu_tanh", "embedding_scale": 96**0.5}
OSS = {
    "windows": (16, 0, 16, 0),
    "moe_layers": (0, 1, 2, 3),
    "ends": (2, 1),
    "bos": None,
    "activation": "swiglu_clamped",
    "amplitude": M32,
}
FACTS = {
    "deepseek_v2_lite_greedy": {"scale": 40**-0.5 * M707**2, "moe_layers": (1,)},
    "deepseek_v2_lite_group": {"scale": 40**-0.5 * M707**2, "moe_layers": (1, 2)},
    "deepseek_v3_bf16": {"scale": 32**-0.5 * M40**2, "moe_layers": (1, 2)},
    "deepseek_v3_fp8_256": {"scale": 32**-0.5 * M40**2, "moe_layers": (1, 2)},
    "deepseek_v3_fp8_odd": {"scale": 40**-0.5 * M4**2, "moe_layers": (1,), "mtp": 1},
    "gemma2": {
        **GEMMA,
        "windows": (16, 0, 16, 0),
        "ends": (1, 0),
        "scale": 24**-0.5,
        "attention_softcap": 8.0,
        "final_softcap": 12.0,
    },
    "gemma3_text": {**GEMMA, "windows": (16, 16, 0, 16), "ends": (1, 0), "scale": 32**-0.5},
    "glm4_moe": {"scale": 32**-0.5, "moe_layers": (1, 2), "ends": (1, 2), "bos": None},
    "gpt_oss_bf16": {**OSS, "scale": 32**-0.5},
    "gpt_oss_mxfp4": {**OSS, "scale": 40**-0.5},
    "llama": {"scale": 16**-0.5},
    "llama3_rope_newstyle": {"scale": 32**-0.5, "ends": (1, 2)},
    "mistral": {"scale": 24**-0.5},
    "mistral_swa": {"scale": 24**-0.5, "windows": (24, 24, 24)},
    "mixtral": {"scale": 24**-0.5, "moe_layers": (0, 1, 2), "ends": (2,), "bos": 1},
    "olmoe": {"scale": 24**-0.5, "moe_layers": (0, 1, 2), "bos": None},
    "qwen2": {"scale": 32**-0.5, "ends": (1, 2), "tied": True},
    "qwen2_moe": {"scale": 24**-0.5, "moe_layers": (0, 1, 2)},
    "qwen3": {"scale": 40**-0.5, "ends": (1, 2), "tied": True},
    "qwen3_moe": {"scale": 48**-0.5, "moe_layers": (0, 1, 2), "ends": (1, 2)},
}
# scoring, experts, experts a token, their size, shared size, groups, kept, normalised, scaling
ROUTING = {
    "deepseek_v2_lite_greedy": ("softmax", 16, 6, 48, 96, 1, 1, False, 1.0),
    "deepseek_v2_lite_group": ("softmax", 16, 4, 48, 96, 4, 2, False, 2.0),
    "deepseek_v3_bf16": ("sigmoid", 16, 4, 40, 40, 4, 2, True, 2.5),
    "deepseek_v3_fp8_256": ("sigmoid", 8, 3, 128, 128, 4, 2, True, 2.5),
    "deepseek_v3_fp8_odd": ("sigmoid", 8, 2, 136, 136, 2, 1, True, 2.5),
    "glm4_moe": ("sigmoid", 16, 4, 48, 48, 1, 1, True, 2.5),
    "gpt_oss_bf16": ("softmax_chosen", 8, 3, 64, 0, 1, 1, False, 1.0),
    "gpt_oss_mxfp4": ("softmax_chosen", 6, 2, 96, 0, 1, 1, False, 1.0),
    "mixtral": ("softmax", 8, 2, 104, 0, 1, 1, True, 1.0),
    "olmoe": ("softmax", 16, 4, 48, 0, 1, 1, False, 1.0),
    "qwen2_moe": ("softmax", 12, 4, 48, 160, 1, 1, False, 1.0),
    "qwen3_moe": ("softmax", 14, 4, 48, 0, 1, 1, True, 1.0),
}
# Roles of the last layer besides the norms and weights that all have.
BIASES = {"q_bias", "k_bias", "v_bias"}
ROLES = {
    "gemma2": {"post_attention_norm", "post_ffn_norm"},
    "gemma3_text": {"post_attention_norm", "post_ffn_norm", "q_norm", "k_norm"},
    "glm4_moe": BIASES | {"q_norm", "k_norm", "router", "router_correction"},
    "gpt_oss_bf16": BIASES | {"o_bias", "sinks", "router", "router_bias"},
    "gpt_oss_mxfp4": BIASES | {"o_bias", "sinks", "router", "router_bias"},
    "mixtral": {"router"},
    "olmoe": {"q_norm", "k_norm", "router"},
    "qwen2": BIASES,
    "qwen2_moe": BIASES | {"router", "shared_gate"},
    "qwen3": {"q_norm", "k_norm"},
    "qwen3_moe": {"q_norm", "k_norm", "router"},
    "deepseek_v3_bf16": {"q_a", "q_a_norm", "q_b", "router", "router_correction"},
    "deepseek_v3_fp8_256": {"q_a", "q_a_norm", "q_b", "router", "router_correction"},
    "deepseek_v3_fp8_odd": {"q_a", "q_a_norm", "q_b", "router", "router_correction"},
    "deepseek_v2_lite_greedy": {"q", "router"},
    "deepseek_v2_lite_group": {"q", "router"},
}
# Keys of which another value may leave the spec as it is.
MAY_NOT_MATTER = {
    *("architectures", "attention_dropout", "aux_loss_alpha", "cache_implementation", "dtype"),
    *("ep_size", "initializer_range", "output_router_logits", "pad_token_id", "pretraining_tp"),
    *("router_aux_loss_coef", "seq_aux", "torch_dtype", "transformers_version", "use_cache"),
    *("attention_bias", "mlp_bias", "use_qk_norm"),  # these change the table
    *("sliding_window", "max_window_layers", "use_sliding_window"),  # each without the others
    *("n_group", "topk_group"),  # greedy routing has none
    "decoder_sparse_step",
    "initial_context_length",
    "max_position_embeddings",  # YaRN may reach further
    "quantization_config",
}
BROKEN = [None, True, -1, 0, 3, 2.5, 10**30, -1e300, math.nan, "x", [], [-1], ["x"], {}, {"x": 1}]


def spec_of(name):
    return read_spec(config_of(name), generation_of(name))


def bound_of(name):
    return bind_tensors(spec_of(name), checkpoint_of(name), config_of(name))


def test_every_family_has_an_oracle_with_facts():
    folders = {path.parent.name for path in Path(moechat.models.__file__).parent.glob("*/spec.py")}
    assert {spec_of(name).architecture for name in NAMES} == folders
    assert set(FACTS) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_dimensions(name):
    spec, config = spec_of(name), config_of(name)
    facts = DEFAULTS | FACTS[name]
    for key in ("hidden_size", "vocab_size", "intermediate_size", "rms_norm_eps"):
        assert getattr(spec, key) == config[key]
    assert spec.num_heads == config["num_attention_heads"]
    assert spec.context_tokens == config["max_position_embeddings"]
    assert spec.softmax_scale == pytest.approx(facts["scale"], rel=1e-14)
    assert spec.num_layers == config["num_hidden_layers"]
    windows = tuple(layer.window for layer in spec.layers)
    assert windows == (facts["windows"] or (0,) * spec.num_layers)
    assert tuple(i for i, layer in enumerate(spec.layers) if layer.moe) == facts["moe_layers"]
    assert (spec.end_ids, spec.bos_id) == (facts["ends"], facts["bos"])
    assert (spec.tied_embeddings, spec.num_mtp_layers) == (facts["tied"], facts["mtp"])
    assert spec.activation == facts["activation"]
    for key in ("attention_softcap", "final_softcap", "embedding_scale"):
        assert getattr(spec, key) == facts[key]
    assert spec.ropes[0].amplitude == pytest.approx(facts["amplitude"], rel=1e-14)
    assert spec.ropes[0].interleaved is isinstance(spec.attention, LatentAttention)


@pytest.mark.parametrize("name", NAMES)
def test_routing(name):
    moe = spec_of(name).moe
    if name not in ROUTING:
        assert moe is None
        return
    assert ROUTING[name] == (
        moe.scoring,
        moe.num_experts,
        moe.num_experts_per_token,
        moe.intermediate_size,
        moe.shared_intermediate_size,
        moe.num_groups,
        moe.num_groups_kept,
        moe.normalise_weights,
        moe.routed_scaling,
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_table_is_what_the_folder_stores(name):
    stored = set(checkpoint_of(name).tensors)
    mtp = {key for key in stored if key.startswith("model.layers.2.")} if "odd" in name else set()
    parts = set()
    for bound in bound_of(name):
        for part in (bound.data, bound.scale, bound.zeros, bound.group_index):
            parts |= {part.name} if part is not None else set()
    assert parts == stored - mtp


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_is_needed_and_no_other_is_accepted(name):
    config, spec = config_of(name), spec_of(name)
    for bound in bound_of(name)[:: max(1, len(bound_of(name)) // 8)]:
        checkpoint = checkpoint_of(name)
        del checkpoint.tensors[bound.data.name]
        with pytest.raises(Exception, match="missing"):
            bind_tensors(spec, checkpoint, config)
    with pytest.raises(Exception, match="1 not expected"):
        bind_tensors(spec, checkpoint_of(name).add("model.extra.weight", "BF16", 4), config)


@pytest.mark.parametrize("name", NAMES)
def test_roles(name):
    spec = spec_of(name)
    table = tensor_table(spec, config_of(name))
    roles = [entry.role for entry in table]
    assert len(set(roles)) == len(roles)
    assert ("head" in roles) is not spec.tied_embeddings
    prefix = f"layers.{spec.num_layers - 1}."
    common = {"attention_norm", "ffn_norm", "o"}
    latent = isinstance(spec.attention, LatentAttention)
    common |= {"kv_a", "kv_a_norm", "kv_b"} if latent else {"q", "k", "v"}
    if not spec.layers[-1].moe:
        common |= {"gate", "up", "down"}
    last = {role.removeprefix(prefix) for role in roles if role.startswith(prefix)}
    experts = {role for role in last if role.startswith(("experts.", "shared."))}
    assert last - experts == common | ROLES.get(name, set())
    if spec.moe is None:
        assert not experts
    elif spec.architecture == "gpt_oss":
        parts = ("gate_up", "gate_up_bias", "down", "down_bias")
        assert experts == {f"experts.*.{part}" for part in parts}
    else:
        owners = [f"experts.{expert}" for expert in range(spec.moe.num_experts)]
        owners += ["shared"] if spec.moe.shared_intermediate_size else []
        assert experts == {f"{owner}.{part}" for owner in owners for part in ("gate", "up", "down")}


@pytest.mark.parametrize("name", NAMES)
def test_norms_of_gemma_alone_get_one_added(name):
    gemma = spec_of(name).architecture.startswith("gemma")
    for entry in tensor_table(spec_of(name), config_of(name)):
        norm = entry.role.endswith("norm")
        assert entry.added == (1.0 if gemma and norm else 0.0)


@pytest.mark.parametrize("name", NAMES)
def test_no_value_of_any_key_breaks_or_is_ignored(name):
    """Another value is refused, changes the spec, or is known not to matter."""
    config = config_of(name)
    spec = read_spec(config, {})
    for key in config:
        for value in BROKEN:
            try:
                changed = read_spec(config | {key: value}, {})
            except ArchitectureUnsupported as error:
                assert len(error.message) < 400
                continue
            if changed == spec:
                same = value == config[key] or not (value or config[key])
                assert value is None or same or key in MAY_NOT_MATTER, (key, value)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_key_breaks_nothing(name):
    config = config_of(name)
    for key in config:
        try:
            read_spec({k: v for k, v in config.items() if k != key}, {})
        except ArchitectureUnsupported as error:
            assert "config.json" in error.message


@pytest.mark.parametrize("name", NAMES)
def test_unknown_keys_are_refused_by_name(name):
    with pytest.raises(ArchitectureUnsupported, match="'attention_twist'"):
        read_spec(config_of(name) | {"attention_twist": 1}, {})
    for key in ("rope_scaling", "rope_parameters"):
        inner = config_of(name).get(key)
        if inner:
            with pytest.raises(ArchitectureUnsupported, match="'twist'"):
                read_spec(config_of(name) | {key: inner | {"twist": 1}}, {})


@pytest.mark.parametrize("name", NAMES)
def test_two_styles_of_rope_settings_contradict(name):
    both = {"rope_scaling": {"rope_type": "default"}, "rope_parameters": {"rope_type": "default"}}
    with pytest.raises(ArchitectureUnsupported, match="a second time"):
        read_spec(config_of(name) | both, {})
