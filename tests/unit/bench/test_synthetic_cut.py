"""The cut planner: a pure function of shape, wishes, free memory and free disk."""

from __future__ import annotations

import pytest
from tiny_shapes import real

from moechat.bench.synthetic.config import Shape
from moechat.bench.synthetic.cut import Room, plan_cut
from moechat.bench.synthetic.tensors import Recipe, Sizes, stored_parts, total_bytes
from moechat.errors import DoesNotFit, Usage

GB = 10**9


def plan(name, ram_gb, disk_gb=10_000, layers=None, experts=None):
    whole = real(name)
    room = Room(int(ram_gb * GB), int(disk_gb * GB))
    return plan_cut(whole, Recipe.of(whole), layers, experts, room)


def counts(cut):
    return cut.shape.dense_layers, cut.shape.moe_layers, cut.shape.experts


# DeepSeek-V3 in FP8: outside 3.707 GB, dense layer 0.583, one with experts 11.51.
def test_as_many_layers_as_60_percent_of_memory_holds():
    assert counts(plan("deepseek-v3", 64)) == (2, 2, 256)  # 27.9 of 38.4 GB
    assert counts(plan("deepseek-v3", 67)) == (2, 3, 256)  # 39.4 of 40.2
    assert counts(plan("deepseek-v3", 2000)) == (2, 58, 256)  # never more than there are
    assert plan("deepseek-v3", 2000).notes == ()


def test_experts_are_cut_when_one_layer_does_not_fit():
    cut = plan("deepseek-v3", 24)
    dense, moe, experts = counts(cut)
    assert (dense, moe) == (2, 1) and experts % 8 == 0  # 8 groups
    # 14.4 GB less 4.87 for the rest and 0.233 for attention and the shared expert: 211 fit.
    assert experts == 208
    assert cut.num_bytes <= 0.6 * 24 * GB < cut.num_bytes + 8 * 44.1e6
    assert "208 of 256 experts" in cut.notes[0]


def test_disk_bounds_too():
    assert counts(plan("deepseek-v3", 2000, disk_gb=30)) == (2, 2, 256)
    with pytest.raises(DoesNotFit) as caught:
        plan("deepseek-v3", 2000, disk_gb=4)
    assert caught.value.exit_code == 4
    assert "4 GB of disk" in caught.value.message and "GB are needed" in caught.value.message


def test_models_without_dense_layers_get_two_with_experts():
    assert counts(plan("qwen3-30b-a3b", 7)) == (0, 2, 128)
    dense, moe, experts = counts(plan("qwen3-30b-a3b", 4))
    assert (dense, moe) == (0, 2) and 8 <= experts < 128
    assert counts(plan("qwen3-30b-a3b", 500)) == (0, 48, 128)


def test_layers_that_alternate_are_kept_in_pairs():
    _, moe, experts = counts(plan("gpt-oss-20b", 8))
    assert moe % 2 == 0 and moe >= 4 and experts == 32
    cut = plan("gpt-oss-20b", 64, layers=5)
    assert cut.shape.moe_layers == 6 and "6 layers instead of 5" in cut.notes[0]


def test_wishes_are_followed():
    cut = plan("deepseek-v3", 24, layers=1, experts=16)
    assert counts(cut) == (2, 1, 16) and "16 of 256 experts" in cut.notes[0]
    assert counts(plan("deepseek-v3", 24, layers=2))[:2] == (2, 2)
    # 12 GB less 4.87 and 0.233 are 156 experts.
    assert counts(plan("deepseek-v3", 20, layers=1)) == (2, 1, 152)
    # What is asked for in so many words may fill memory: 16.4 GB.
    assert counts(plan("deepseek-v3", 20, layers=1, experts=256)) == (2, 1, 256)


def test_one_layer_alone_cannot_be_told_apart_from_the_head():
    cut = plan("olmoe-1b-7b", 24, layers=1)
    assert cut.shape.moe_layers == 2 and "could not be told apart" in cut.notes[0]


@pytest.mark.parametrize(
    ("wishes", "said"),
    [
        ({"layers": 0}, "58 layers"),
        ({"layers": 59}, "58 layers"),
        ({"experts": 12}, "16 to 256 a layer, a multiple of 8"),
        ({"experts": 8}, "16 to 256"),
        ({"experts": 264}, "16 to 256"),
    ],
)
def test_wishes_that_no_such_model_can_have_are_usage_errors(wishes, said):
    with pytest.raises(Usage) as caught:
        plan("deepseek-v3", 64, **wishes)
    assert caught.value.exit_code == 2 and said in caught.value.message


def test_wishes_beyond_memory_are_refused_with_the_numbers():
    with pytest.raises(DoesNotFit) as caught:
        plan("deepseek-v3", 24, layers=3, experts=256)
    message = caught.value.message
    assert "3 layers of deepseek-v3 with 256 experts" in message
    assert "39.4" in message and "24 GB of memory" in message


@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss-20b", "glm-4.6", "kimi-k2-thinking"])
def test_sizes_add_up_to_the_stored_bytes(name):
    whole = real(name)
    recipe = Recipe.of(whole)
    sizes = Sizes.of(whole, recipe)
    for dense, moe, experts in ((2, 1, 32), (1, 2, 16)):
        dense = dense if whole.dense_layers else 0
        cut = whole.cut(dense_layers=dense, moe_layers=moe, experts=experts)
        assert sizes.total(dense, moe, experts) == total_bytes(stored_parts(cut, recipe))


def test_an_entry_without_shapes_is_refused():
    for entry in ({}, {"geometry": {}, "config": {}, "architecture": "LlamaForCausalLM"}):
        with pytest.raises(Usage):
            Shape.of_entry("x", entry)
    good = real("olmoe-1b-7b").entry
    with pytest.raises(Usage):
        Shape.of_entry("x", good | {"geometry": {"num_layers": 3}})
