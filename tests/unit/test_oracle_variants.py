"""Variant folders mean what their twins say, element by element as the formats define it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from oracle_variants import VARIANTS, float_tensors, variant
from oracles import ORACLE_NAMES

from moechat.weights.mapped import Checkpoint

# Where AWQ's GEMM layout keeps the outputs 0 to 7 of a word, in nibbles from the low end.
AWQ_NIBBLES = np.array([0, 4, 1, 5, 2, 6, 3, 7])
E4M3 = np.array(
    [
        m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)
        for e in range(16)
        for m in range(8)
    ]
)


def bf16(array):
    return (array.astype(np.uint32) << 16).view(np.float32)


def nibble(words, place):
    return words.view(np.uint32) >> (4 * place).astype(np.uint32) & 15


def plain(tensor):
    if tensor.dtype == "BF16":
        return bf16(tensor.array)
    return tensor.array.view(np.float16) if tensor.dtype == "F16" else tensor.array


def decoded(tensors, module, quantization, outputs, inputs):
    """A module's weight by its parts: o and i run over the whole [outputs, inputs] grid."""
    o, i = np.meshgrid(np.arange(outputs), np.arange(inputs), indexing="ij")

    def part(name):
        return tensors[f"{module}.{name}"].array

    if quantization["quant_method"] == "compressed-tensors":
        scale = plain(tensors[module + ".weight_scale"])
        if quantization["format"] == "float-quantized":
            codes = part("weight")
            return np.where(codes & 128, -1, 1) * E4M3[codes & 127] * scale
        assert part("weight_shape").tolist() == [outputs, inputs]
        return (nibble(part("weight_packed")[o, i // 8], i % 8) - 8.0) * scale[o, i // 32]
    scale = part("scales").view(np.float16).astype(np.float64)
    if quantization["quant_method"] == "awq":
        group, place = i // quantization["group_size"], AWQ_NIBBLES[o % 8]
        code = nibble(part("qweight")[i, o // 8], place)
        return (code - 1.0 * nibble(part("qzeros")[group, o // 8], place)) * scale[group, o]
    group = part("g_idx")[i]
    code = nibble(part("qweight")[i // 8, o], i % 8)
    return (code - 1.0 - nibble(part("qzeros")[group, o // 8], o % 8)) * scale[group, o]


@pytest.mark.parametrize("label", VARIANTS)
def test_every_tensor_stands_for_that_of_the_twin(label):
    recipe = VARIANTS[label]
    stored, twin = (Checkpoint.open(folder).tensors for folder in variant(label))
    quantization = json.loads((variant(label).folder / "config.json").read_text()).get(
        "quantization_config"
    )
    base = float_tensors(recipe.base)
    used, packed = set(), 0
    for name, (dtype, values) in base.items():
        module = name.removesuffix(".weight")
        parts = {key for key in stored if key.startswith(module + ".")} - {module + ".bias"}
        if name in stored and stored[name].dtype != "F8_E4M3":
            used.add(name)
            got = plain(stored[name])
            assert stored[name].dtype == ("F32" if dtype == "F32" else recipe.plain)
        else:
            used |= parts
            packed += 1
            got = decoded(stored, module, quantization, *values.shape)
            error = np.sqrt(np.mean((got - values) ** 2) / np.mean(values**2))
            assert error < (0.04 if quantization.get("format") == "float-quantized" else 0.12)
        if recipe.plain != "F32":  # its twin is the oracle folder itself
            want = twin[name].array
            assert got.shape == want.shape and np.abs(got - want).max() <= 2e-7 * np.abs(want).max()
            assert twin[name].dtype == "F32"
    assert used == set(stored)
    assert (packed > 0) == (recipe.pack is not None)


def test_act_order_really_reorders_and_zero_points_differ():
    tensors = Checkpoint.open(variant("qwen2-gptq-act-order").folder).tensors
    groups = tensors["model.layers.0.mlp.down_proj.g_idx"].array
    assert (np.diff(groups) < 0).any() and (np.bincount(groups) == 32).all()
    for label, name in (("qwen2-awq", "q_proj"), ("qwen3_moe-gptq", "k_proj")):
        tensors = Checkpoint.open(variant(label).folder).tensors
        words = tensors[f"model.layers.1.self_attn.{name}.qzeros"].array
        zeros = nibble(words[..., None], np.arange(8))
        assert len(np.unique(zeros)) > 3 and zeros.max() < 15


def test_modules_left_out_are_named():
    def quantization(label):
        return json.loads((variant(label).folder / "config.json").read_text())[
            "quantization_config"
        ]

    assert quantization("llama-int4")["ignore"] == ["lm_head"]
    assert "model.layers.1.mlp.gate" in quantization("glm4_moe-fp8-channel")["ignore"]
    assert quantization("qwen2-awq")["modules_to_not_convert"] is None
    left_out = quantization("deepseek_v3-awq")["modules_to_not_convert"]
    assert "model.layers.0.self_attn.kv_b_proj" in left_out and len(left_out) == 5


def test_the_values_of_every_oracle_folder_are_known():
    for name in ORACLE_NAMES:
        tensors = float_tensors(name)
        assert all(values.dtype == np.float32 for _, values in tensors.values())
        deviation = tensors["model.layers.0.self_attn.o_proj.weight"].array.std()
        assert 0.01 < deviation < 0.5
    experts = float_tensors("gpt_oss_mxfp4")["model.layers.0.mlp.experts.gate_up_proj"].array
    assert experts.shape == (6, 160, 192)
