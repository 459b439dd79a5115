import dataclasses
import json

import pytest
from oracles import oracle_folder

from moechat.models.deepseek_v3.spec import read_spec
from moechat.models.deepseek_v3.tensors import is_skipped, tensor_table

BF16 = oracle_folder("deepseek_v3_bf16")


@pytest.fixture
def spec():
    return read_spec(json.loads((BF16 / "config.json").read_text()), {})


def by_role(spec):
    table = tensor_table(spec)
    rows = {row.role: row for row in table}
    assert len(rows) == len(table) == len({row.name for row in table})
    return rows


def test_the_table_has_one_row_a_tensor_of_the_checkpoint(spec):
    index = json.loads((BF16 / "model.safetensors.index.json").read_text())
    assert {row.name for row in tensor_table(spec)} == set(index["weight_map"])


def test_roles_of_the_three_kinds_of_layer_part(spec):
    rows = by_role(spec)
    attention = ["attention_norm", "q_a", "q_a_norm", "q_b", "kv_a", "kv_a_norm", "kv_b", "o"]
    attention.append("ffn_norm")
    dense = ["gate", "up", "down"]
    moe = ["router", "router_bias", *(f"shared.{part}" for part in dense)]
    moe += [f"experts.{expert}.{part}" for expert in range(16) for part in dense]
    expected = {"embedding", "final_norm", "head"}
    expected |= {f"layers.0.{part}" for part in attention + dense}
    expected |= {f"layers.{layer}.{part}" for layer in (1, 2) for part in attention + moe}
    assert set(rows) == expected


def test_shapes_and_scale_names(spec):
    rows = by_role(spec)
    q_b = rows["layers.1.q_b"]
    assert q_b.shape == (4 * 32, 48)
    assert q_b.scale == "model.layers.1.self_attn.q_b_proj.weight_scale_inv"
    assert rows["layers.1.kv_a"].shape == (32 + 16, 96)
    assert rows["layers.1.kv_b"].shape == (4 * (16 + 24), 32)
    assert rows["layers.1.o"].shape == (96, 4 * 24)
    assert rows["layers.0.down"].shape == (96, 160)
    assert rows["layers.1.experts.3.up"].shape == (40, 96)
    assert rows["layers.1.router"].scale is None
    assert "fp8_block" not in rows["layers.1.router"].formats


def test_variants(spec):
    plain_query = by_role(dataclasses.replace(spec, q_lora_rank=0))
    assert plain_query["layers.0.q"].name == "model.layers.0.self_attn.q_proj.weight"
    assert plain_query["layers.0.q"].shape == (128, 96)
    assert not {"layers.0.q_a", "layers.0.q_a_norm", "layers.0.q_b"} & set(plain_query)
    assert "head" not in by_role(dataclasses.replace(spec, tied_embeddings=True))
    two_shared = by_role(dataclasses.replace(spec, num_shared_experts=2))
    assert two_shared["layers.1.shared.down"].shape == (96, 80)
    all_dense = by_role(dataclasses.replace(spec, num_dense_layers=3))
    assert not any("experts" in role for role in all_dense)


def test_only_declared_mtp_layers_and_rotary_frequencies_are_skipped(spec):
    one_mtp = dataclasses.replace(spec, num_mtp_layers=1)
    assert is_skipped(one_mtp, "model.layers.3.eh_proj.weight")
    assert not is_skipped(one_mtp, "model.layers.4.eh_proj.weight")
    assert not is_skipped(one_mtp, "model.layers.2.eh_proj.weight")
    assert not is_skipped(one_mtp, "x.model.layers.3.eh_proj.weight")
    assert not is_skipped(spec, "model.layers.3.eh_proj.weight")
    assert is_skipped(spec, "model.layers.2.self_attn.rotary_emb.inv_freq")
