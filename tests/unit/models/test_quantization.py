import copy

import pytest

from moechat.errors import ArchitectureUnsupported
from moechat.models.config_reader import ConfigReader
from moechat.models.quantization import Quantization, read_quantization

FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "modules_to_not_convert": ["lm_head"],
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
INT4 = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
CHANNEL = copy.deepcopy(INT4) | {"format": "float-quantized", "sparsity_config": {}}
CHANNEL["config_groups"]["group_0"]["input_activations"] = {"dynamic": True, "num_bits": 8}
CHANNEL["config_groups"]["group_0"]["weights"] |= {
    "group_size": None,
    "num_bits": 8,
    "strategy": "channel",
    "type": "float",
}
AWQ = {
    "bits": 4,
    "group_size": 128,
    "modules_to_not_convert": None,
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}
GPTQ = {
    "bits": 4,
    "damp_percent": 0.01,
    "desc_act": False,
    "group_size": 128,
    "quant_method": "gptq",
    "static_groups": False,
    "sym": True,
    "true_sequential": True,
}
MXFP4 = {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"}


def read(section, key="quantization_config"):
    reader = ConfigReader({key: section})
    quantization = read_quantization(reader)
    reader.finish()
    return quantization


def with_weights(base, **changes):
    section = copy.deepcopy(base)
    section["config_groups"]["group_0"]["weights"] |= changes
    return section


def test_parameters_of_every_method():
    assert read_quantization(ConfigReader({})) == Quantization()
    assert read(FP8) == Quantization(method="fp8", fp8_block=(128, 128))
    assert read(FP8 | {"weight_block_size": [1, 64]}).fp8_block == (1, 64)
    assert read(FP8 | {"weight_block_size": None}) == Quantization(method="fp8")
    assert read(INT4) == Quantization(method="compressed-tensors", group_sizes=(32,))
    assert read(CHANNEL) == Quantization(method="compressed-tensors")
    assert read(AWQ) == Quantization(method="awq", group_sizes=(128,))
    assert read(GPTQ) == Quantization(method="gptq", group_sizes=(128,))
    assert read(GPTQ | {"desc_act": True}).act_order is True
    assert read(GPTQ | {"group_size": -1}).group_sizes == (0,)
    assert read(MXFP4) == Quantization(method="mxfp4")


def test_groups_of_different_parameters_are_all_kept():
    section = with_weights(INT4, group_size=64)
    weights = CHANNEL["config_groups"]["group_0"]["weights"]
    block = weights | {"strategy": "block", "block_structure": [128, 64]}
    section["config_groups"] |= {
        "group_1": INT4["config_groups"]["group_0"] | {"format": "pack-quantized"},
        "group_2": {"targets": ["re:.*experts.*"], "weights": weights},
        "group_3": {"targets": [], "weights": block},
    }
    section["format"] = "mixed-precision"
    quantization = read(section)
    assert (quantization.group_sizes, quantization.fp8_block) == ((64, 32), (128, 64))
    other = copy.deepcopy(section)
    other["config_groups"]["group_4"] = {"weights": block | {"block_structure": [64, 64]}}
    with pytest.raises(ArchitectureUnsupported, match="one block size"):
        read(other)


def test_the_older_name_of_compressed_tensors():
    section = {key: value for key, value in INT4.items() if key != "quant_method"}
    assert read(section, "compression_config") == read(INT4)
    both = ConfigReader({"quantization_config": INT4, "compression_config": section})
    with pytest.raises(ArchitectureUnsupported, match="a second time"):
        read_quantization(both)


@pytest.mark.parametrize("actorder", ["weight", "static", False])
def test_orders_that_leave_no_index(actorder):
    assert read(with_weights(INT4, actorder=actorder)) == read(INT4)


@pytest.mark.parametrize(
    ("section", "changes"),
    [
        (FP8, {"dequantize": False}),
        (MXFP4, {"dequantize": False}),
        (AWQ, {"format": "gemm", "method": "awq", "checkpoint_format": "gemm"}),
        (GPTQ, {"format": "gptq", "method": "gptq", "checkpoint_format": "gptq"}),
        (GPTQ, {"is_marlin_format": False, "lm_head": False, "meta": {"quantizer": ["x"]}}),
        (GPTQ, {"something": None}),
    ],
)
def test_what_says_nothing_new_is_accepted(section, changes):
    assert read(section | changes) == read(section)


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("fp8", "quantization_config"),
        ({}, "quant_method"),
        (FP8 | {"quant_method": "bitsandbytes"}, "quant_method"),
        (FP8 | {"quant_method": ["fp8"]}, "quant_method"),
        (FP8 | {"fmt": "e5m2"}, "fmt"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size"),
        (FP8 | {"weight_block_size": [0, 128]}, "weight_block_size"),
        (FP8 | {"weight_block_size": [128, 2**31]}, "weight_block_size"),
        (FP8 | {"weight_block_size": "128x128"}, "weight_block_size"),
        (FP8 | {"bits": 8}, "bits"),
        (FP8 | {"dequantize": True}, "dequantize"),
        (MXFP4 | {"dequantize": True}, "dequantize"),
        (MXFP4 | {"bits": 4}, "bits"),
        (AWQ | {"bits": 8}, "bits"),
        (AWQ | {"bits": None}, "bits"),
        (AWQ | {"version": "gemv"}, "version"),
        (AWQ | {"zero_point": False}, "zero_point"),
        (AWQ | {"group_size": 0}, "group_size"),
        (AWQ | {"group_size": None}, "group_size"),
        (AWQ | {"desc_act": True}, "desc_act"),
        (GPTQ | {"bits": 3}, "bits"),
        (GPTQ | {"checkpoint_format": "gptq_v2"}, "checkpoint_format"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format"),
        (GPTQ | {"format": "gptq_v2"}, "format"),
        (GPTQ | {"method": "gptaq"}, "method"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format"),
        (AWQ | {"format": "gemv"}, "format"),
        (GPTQ | {"dynamic": {"+:.*": {"bits": 8}}}, "dynamic"),
        (GPTQ | {"desc_act": 1}, "desc_act"),
        (GPTQ | {"sym": "yes"}, "sym"),
        (GPTQ | {"pack_dtype": "int16"}, "pack_dtype"),
        (INT4 | {"format": "nvfp4-pack-quantized"}, "format"),
        (INT4 | {"format": None}, "format"),
        (INT4 | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        (INT4 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "format"),
        (INT4 | {"config_groups": [1]}, "config_groups"),
        (INT4 | {"config_groups": {"group_0": 1}}, "group_0"),
        (INT4 | {"bits": 4}, "bits"),
        (with_weights(INT4, num_bits=8), "num_bits"),
        (with_weights(INT4, symmetric=False), "symmetric"),
        (with_weights(INT4, strategy="channel"), "strategy"),
        (with_weights(INT4, group_size=16), "group_size"),
        (with_weights(INT4, group_size=None), "group_size"),
        (with_weights(INT4, actorder="group"), "actorder"),
        (with_weights(INT4, type="uint"), "type"),
        (with_weights(INT4, zero_point="float"), "zero_point"),
        (with_weights(CHANNEL, num_bits=4), "num_bits"),
        (with_weights(CHANNEL, strategy="tensor_group"), "strategy"),
        (with_weights(CHANNEL, strategy="block"), "block_structure"),
        (with_weights(CHANNEL, block_structure=[128, 128]), "block_structure"),
        (with_weights(CHANNEL, group_size=16), "group_size"),
    ],
)
def test_other_quantisations_are_refused_by_name(section, key):
    with pytest.raises(ArchitectureUnsupported, match=key):
        read(section)
