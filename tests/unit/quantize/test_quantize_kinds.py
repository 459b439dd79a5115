import pytest

from moechat.quantize.kinds import KINDS, is_matrix, is_stacked_experts, kind_of, module_of

LAYER = "model.layers.3."
MATRICES = {
    "self_attn.q_proj": "attention",
    "self_attn.q_a_proj": "attention",
    "self_attn.kv_a_proj_with_mqa": "attention",
    "self_attn.kv_b_proj": "attention",
    "self_attn.o_proj": "attention",
    "mlp.gate_proj": "dense MLP",
    "mlp.down_proj": "dense MLP",
    "mlp.shared_experts.up_proj": "shared experts",
    "mlp.shared_expert.up_proj": "shared experts",
    "mlp.experts.17.down_proj": "routed experts",
    "block_sparse_moe.experts.0.w2": "routed experts",
}
OTHERS = {
    "model.embed_tokens.weight": "embeddings",
    "lm_head.weight": "head",
    "model.norm.weight": "norms",
    LAYER + "input_layernorm.weight": "norms",
    LAYER + "self_attn.q_a_layernorm.weight": "norms",
    LAYER + "self_attn.q_norm.weight": "norms",
    LAYER + "mlp.gate.weight": "routers",
    LAYER + "mlp.gate.e_score_correction_bias": "routers",
    LAYER + "mlp.router.weight": "routers",
    LAYER + "mlp.router.bias": "biases",
    LAYER + "mlp.shared_expert_gate.weight": "routers",
    LAYER + "block_sparse_moe.gate.weight": "routers",
    LAYER + "self_attn.q_proj.bias": "biases",
    LAYER + "mlp.experts.gate_up_proj_bias": "biases",
    LAYER + "mlp.experts.gate_up_proj": "routed experts",
    LAYER + "self_attn.sinks": "attention",
    "model.layers.61.eh_proj.weight": "other",
    "model.layers.61.enorm.weight": "norms",
    "model.layers.61.embed_tokens.weight": "embeddings",
    "model.layers.61.shared_head.head.weight": "head",
    "model.layers.61.shared_head.norm.weight": "norms",
    "model.layers.0.self_attn.indexer.weights_proj.weight": "attention",
    "vision_tower.encoder.layers.0.self_attn.q_proj.weight": "attention",
    "multi_modal_projector.weight": "other",
}


@pytest.mark.parametrize(("module", "kind"), MATRICES.items())
@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
def test_projections_of_the_language_model_are_matrices(prefix, module, kind):
    name = f"{prefix}layers.61.{module}.weight"
    assert is_matrix(name, 2) and kind_of(name) == kind in KINDS
    assert not is_matrix(name, 1) and not is_matrix(name + "_scale", 2)


@pytest.mark.parametrize(("name", "kind"), OTHERS.items())
def test_everything_else_stays(name, kind):
    assert not is_matrix(name, 2) and kind_of(name) == kind in KINDS


def test_stacked_experts_have_more_than_two_dimensions():
    assert is_stacked_experts(LAYER + "mlp.experts.gate_up_proj", 3)
    assert not is_stacked_experts(LAYER + "mlp.experts.gate_up_proj_bias", 2)
    assert not is_stacked_experts("vision_tower.patch_embed.proj.weight", 4)


def test_modules_are_what_readers_could_take_for_linear_layers():
    assert module_of(LAYER + "mlp.gate.weight", 2) == LAYER + "mlp.gate"
    assert module_of("lm_head.weight", 2) == "lm_head"
    assert module_of("model.embed_tokens.weight", 2) is None
    assert module_of("model.norm.weight", 1) is None
    assert module_of(LAYER + "mlp.experts.gate_up_proj", 3) is None
