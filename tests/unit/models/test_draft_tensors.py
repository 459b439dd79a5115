"""The tensors of the multi-token-prediction layer: bound only when asked for."""

import pytest
from fake_checkpoint import FakeCheckpoint, config_of

from moechat.errors import BadParameter, CheckpointDamaged
from moechat.models.architectures import (
    bind_tensors,
    draft_tensor_table,
    read_spec,
    tensor_table,
)

NAME = "deepseek_v3_fp8_odd"
LAYER = "model.layers.2."


def checkpoint(without=()):
    """Everything that the two tables name, as BF16 or F32."""
    spec, config = read_spec(config_of(NAME), {}), config_of(NAME)
    made = FakeCheckpoint()
    for entry in [*tensor_table(spec, config), *draft_tensor_table(spec, config)]:
        if not entry.name.startswith(tuple(without)):
            made.add(entry.name, "BF16", *entry.shape)
    return made


def bind(stored, **changes):
    config = config_of(NAME) | changes
    return bind_tensors(read_spec(config, {}), stored, config, draft=True)


def drafting(bound):
    return {entry.spec.role: entry for entry in bound if entry.spec.role.startswith("draft.")}


def test_the_layer_has_every_part_of_a_layer_with_experts_and_its_own():
    spec, config = read_spec(config_of(NAME), {}), config_of(NAME)
    usual = {
        entry.role.removeprefix("layers.1.")
        for entry in tensor_table(spec, config)
        if entry.role.startswith("layers.1.")
    }
    own = {"token_norm", "hidden_norm", "projection", "final_norm", "embedding", "head"}
    roles = drafting(bind(checkpoint()))
    assert set(roles) == {f"draft.{part}" for part in usual | own}
    assert all(entry.data.name.startswith(LAYER) for entry in roles.values())
    assert roles["draft.projection"].data.name == LAYER + "eh_proj.weight"
    assert roles["draft.projection"].spec.shape == (200, 400)
    assert roles["draft.token_norm"].data.name == LAYER + "enorm.weight"
    assert roles["draft.hidden_norm"].data.name == LAYER + "hnorm.weight"


def test_embedding_and_head_may_be_the_main_ones():
    shared = (LAYER + "embed_tokens", LAYER + "shared_head.head")
    roles = drafting(bind(checkpoint(without=shared)))
    assert not {"draft.embedding", "draft.head"} & set(roles)
    assert "draft.final_norm" in roles
    quantised = checkpoint(without=shared[1:])
    quantised.add(LAYER + "shared_head.head.weight", "F8_E4M3", 320, 200)
    quantised.add(LAYER + "shared_head.head.weight_scale_inv", "F32", 3, 2)
    assert drafting(bind(quantised))["draft.head"].format == "fp8"


def test_what_is_missing_is_named():
    with pytest.raises(CheckpointDamaged) as caught:
        bind(checkpoint(without=[LAYER + "self_attn.o_proj", LAYER + "enorm"]))
    for name in ("self_attn.o_proj.weight", "enorm.weight"):
        assert LAYER + name in caught.value.message


@pytest.mark.parametrize(
    ("stored", "changes", "reason"),
    [
        (checkpoint(without=[LAYER]), {"num_nextn_predict_layers": 0}, "it has no"),
        (checkpoint(without=[LAYER]), {}, "its files leave out"),
    ],
)
def test_models_without_the_layer(stored, changes, reason):
    with pytest.raises(BadParameter, match=f"not possible with this model: {reason}"):
        bind(stored, **changes)


def test_architectures_without_a_table():
    config = config_of("glm4_moe") | {"num_nextn_predict_layers": 1}
    with pytest.raises(BadParameter, match=r"does not use .* of glm4_moe"):
        bind_tensors(read_spec(config, {}), FakeCheckpoint(), config, draft=True)
