import dataclasses
import json
from pathlib import Path

import pytest

from moechat.models.architectures import read_spec, tensor_table
from moechat.models.spec import LayerSpec

ORACLE = Path(__file__).parents[3] / "fixtures/oracle"


@pytest.fixture
def spec():
    return read_spec(json.loads((ORACLE / "deepseek_v3_bf16/config.json").read_text()), {})


def by_role(spec):
    table = tensor_table(spec, {"architectures": []})
    rows = {row.role: row for row in table}
    assert len(rows) == len(table) == len({row.name for row in table})
    return rows


def test_roles_of_the_three_kinds_of_layer_part(spec):
    rows = by_role(spec)
    attention = ["attention_norm", "q_a", "q_a_norm", "q_b", "kv_a", "kv_a_norm", "kv_b", "o"]
    attention.append("ffn_norm")
    dense = ["gate", "up", "down"]
    moe = ["router", "router_correction", *(f"shared.{part}" for part in dense)]
    moe += [f"experts.{expert}.{part}" for expert in range(16) for part in dense]
    expected = {"embedding", "final_norm", "head"}
    expected |= {f"layers.0.{part}" for part in attention + dense}
    expected |= {f"layers.{layer}.{part}" for layer in (1, 2) for part in attention + moe}
    assert set(rows) == expected


def test_shapes_and_scale_names(spec):
    rows = by_role(spec)
    q_b = rows["layers.1.q_b"]
    assert q_b.shape == (4 * 32, 48)
    assert q_b.name == "model.layers.1.self_attn.q_b_proj.weight" and q_b.matrix
    assert rows["layers.1.kv_a"].shape == (32 + 16, 96)
    assert rows["layers.1.kv_b"].shape == (4 * (16 + 24), 32)
    assert rows["layers.1.o"].shape == (96, 4 * 24)
    assert rows["layers.0.down"].shape == (96, 160)
    assert rows["layers.1.experts.3.up"].shape == (40, 96)
    assert rows["layers.1.router"].shape == (16, 96) and not rows["layers.1.router"].matrix
    assert rows["head"].matrix and not rows["embedding"].matrix


def test_variants(spec):
    replace = dataclasses.replace
    plain_query = by_role(replace(spec, attention=replace(spec.attention, q_lora_rank=0)))
    assert plain_query["layers.0.q"].name == "model.layers.0.self_attn.q_proj.weight"
    assert plain_query["layers.0.q"].shape == (128, 96)
    assert not {"layers.0.q_a", "layers.0.q_a_norm", "layers.0.q_b"} & set(plain_query)
    assert "head" not in by_role(replace(spec, tied_embeddings=True))
    two_shared = by_role(replace(spec, moe=replace(spec.moe, shared_intermediate_size=80)))
    assert two_shared["layers.1.shared.down"].shape == (96, 80)
    all_dense = by_role(replace(spec, layers=(LayerSpec(),) * 3))
    assert not any("experts" in role for role in all_dense)
