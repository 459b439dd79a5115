"""Bytes a token, against arithmetic by hand from published dimensions."""

from __future__ import annotations

import pytest
from oracles import MINI
from tiny_shapes import real

from moechat.bench.model.weight_bytes import of_files, token_bytes
from moechat.bench.synthetic.measure import _bytes_of
from moechat.bench.synthetic.tensors import Recipe, Sizes
from moechat.registry import load_registry


def test_deepseek_v3s_by_hand():
    expert = 3 * 7168 * 2048 + 4 * 3 * (7168 // 128) * (2048 // 128)
    num_bytes = _bytes_of(real("deepseek-v3"), Recipe.of(real("deepseek-v3")))
    assert num_bytes.routed == 58 * 8 * expert  # 20.43 GB and 4.99 MB of scales
    assert num_bytes.head == 2 * 129280 * 7168
    # The rest: 61 times attention, 3 dense layers, 58 shared experts and routers.
    rest = num_bytes.total - num_bytes.routed - num_bytes.head
    assert rest == pytest.approx(11.41e9 + 1.19e9 + 2.55e9 + 0.21e9, rel=0.005)


# Gigabytes a token and a layer, and in all.
@pytest.mark.parametrize(
    ("name", "per_token", "per_layer"),
    [
        ("deepseek-v3", 20.44, 11.28),
        ("kimi-k2", 21.14, 16.92),
        ("kimi-k2-thinking", 11.9, 9.51),
        ("qwen3-235b-a22b", 28.4, 4.83),
        ("qwen3-30b-a3b", 3.62, 1.21),
        ("glm-4.6", 33.6, 7.55),
        ("glm-4.5-air", 12.5, 4.43),
        ("gpt-oss-120b", 1.91, 1.69),
        ("gpt-oss-20b", 1.27, 0.42),
        ("olmoe-1b-7b", 1.61, 0.81),
        ("deepseek-v2-lite", 2.70, 1.11),
        ("moonlight", 2.70, 1.11),
        ("mixtral-8x7b", 22.55, 2.82),
    ],
)
def test_routed_bytes_of_public_models(name, per_token, per_layer):
    shape = real(name)
    one = shape.cut(dense_layers=0, moe_layers=1)
    routed = shape.moe_layers * _bytes_of(one, Recipe.of(shape)).routed / 1e9
    chosen = shape.geometry["num_experts_per_token"]
    assert routed == pytest.approx(per_token, rel=0.004)
    layer = routed * shape.experts / chosen / shape.moe_layers
    assert layer == pytest.approx(per_layer, rel=0.012)


def test_int4_of_group_32_has_four_and_a_half_bits():
    shape = real("deepseek-v3").cut(moe_layers=1)
    fp8, int4 = (_bytes_of(shape, Recipe.of(shape, format_)) for format_ in ("fp8", "int4"))
    assert int4.routed == 8 * 3 * 7168 * 2048 * 4.5 / 8  # 11.49 GB in 58 layers
    assert int4.head == fp8.head and int4.total < fp8.total


def test_cutting_experts_leaves_the_bytes_of_a_token():
    shape = real("deepseek-v3")
    recipe = Recipe.of(shape)
    some, all_ = _bytes_of(shape.cut(experts=16), recipe), _bytes_of(shape, recipe)
    assert some.routed == all_.routed
    # The router has a row an expert.
    assert all_.total - some.total == 58 * 240 * (2 * 7168 + 4)


def test_minis_bytes_follow_from_its_files():
    num_bytes = of_files(MINI)
    # 5 layers, 4 of 32 experts, 3 matrices of 128 x 384 FP8 with 3 scales.
    assert num_bytes.routed == 5 * 4 * 3 * (128 * 384 + 3 * 4)
    assert num_bytes.head == 2 * 8192 * 384  # the embedding, which is the head, too


def test_a_separate_embedding_counts_one_row():
    stored = [("embedding", 1000), ("head", 500), ("layers.0.experts.3.up", 80), ("x", 1)]
    split = token_bytes(stored, experts=8, chosen=2, vocab=10, tied=False)
    assert (split.routed, split.head, split.total) == (20, 500, 621)
    tied = token_bytes(stored[:1], experts=0, chosen=0, vocab=10, tied=True)
    assert (tied.routed, tied.head, tied.total) == (0, 1000, 1100)


@pytest.mark.parametrize("name", [n for n in load_registry().entries if n != "mini"])
def test_sizes_in_the_registry_follow_from_geometry(name):
    shape = real(name)
    recipe = Recipe.of(shape)
    sizes = Sizes.of(shape, recipe)
    expected = sizes.total(shape.dense_layers, shape.moe_layers, shape.experts)
    if shape.geometry["num_mtp_layers"]:
        # One more layer, with an embedding, a head, a projection of two hidden states, three norms.
        hidden = shape.geometry["hidden_size"]
        expected += sizes.total(0, 1, shape.experts) - sizes.fixed
        expected += 2 * (2 * shape.vocab + 2 * hidden + 3) * hidden
    assert shape.entry["size_bytes"] == expected
