"""Model folders in formats that no oracle folder has, made from the oracle folders' weights.

``variant(label)`` is a folder in the format, and its twin: a folder of the very values that the
format stores, in a type that needs no decoding. In exact mode both must give the same logits within
1e-3. Sources of the layouts are the libraries that write them: compressed-tensors, AutoAWQ,
AutoGPTQ; oracle_packings.py has them.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from oracle_formats import (
    FP8_BLOCK,
    Stored,
    dequantise_mxfp4,
    from_bf16,
    from_e4m3,
    spread,
    to_bf16,
    write_safetensors,
)
from oracle_packings import Packed, awq, fp8_channel, gptq, int4_packed
from oracle_weights import SCALE_SUFFIX, remake_tensors
from oracles import ORACLES, oracle_folder, scratch_folder

_LINEAR = r"(_proj|_proj_with_mqa|\.w[123])\.weight$"
_EXPERTS = r"\.experts\.\d+\..*\.weight$"


class Variant(NamedTuple):
    """Two folders of one function; ``twin`` is F32, or the oracle folder when that is the same."""

    folder: Path
    twin: Path


@dataclass(frozen=True)
class Recipe:
    """What is made of the oracle folder ``base``.

    ``pack`` stores each weight whose name matches ``names`` and whose inputs divide into groups of
    ``group``; everything else is of the type ``plain``, or F32 where the base has it so. ``config``
    holds changes of config.json for both folders, ``own_config`` those for the variant alone.
    """

    base: str
    plain: str = "BF16"
    pack: Callable[[np.ndarray], Packed] | None = None
    group: int = 1
    names: str = _LINEAR
    quantization: Callable[[list[str]], dict[str, Any]] = lambda left_out: {}
    config: dict[str, Any] = field(default_factory=dict)
    own_config: dict[str, Any] = field(default_factory=dict)


def float_tensors(name: str) -> dict[str, Stored]:
    """The values of an oracle folder as F32 under unquantised names; F32 or BF16 as they were.

    The type tells how an unquantised checkpoint would store it: BF16 for all that was quantised.
    """
    config, manifest = (
        json.loads((ORACLES / name / file).read_text()) for file in ("config.json", "manifest.json")
    )
    stored = {k: t for part in remake_tensors(config, manifest).values() for k, t in part.items()}
    values: dict[str, Stored] = {}
    for key, (dtype, array) in stored.items():
        if key.endswith("_blocks"):
            key = key.removesuffix("_blocks")
            wide = dequantise_mxfp4(array, stored[key + "_scales"].array).transpose(0, 2, 1)
            values[key] = Stored("BF16", wide)
        elif dtype == "F8_E4M3":
            scale = stored[key + SCALE_SUFFIX].array
            grid = spread(scale, *array.shape, (FP8_BLOCK, FP8_BLOCK))
            values[key] = Stored("BF16", from_e4m3(array) * grid)
        elif not key.endswith(("_scales", SCALE_SUFFIX)):
            values[key] = Stored(dtype, array if dtype == "F32" else from_bf16(array))
    return values


@functools.cache
def variant(label: str) -> Variant:
    """The two folders of ``VARIANTS[label]``, made at their first use; never to be changed."""
    recipe = VARIANTS[label]
    tensors: dict[str, Stored] = {}
    twin: dict[str, Stored] = {}
    left_out: list[str] = []
    for name, (dtype, values) in float_tensors(recipe.base).items():
        if recipe.pack and re.search(recipe.names, name) and values.shape[1] % recipe.group == 0:
            parts, values = recipe.pack(values)
            module = name.removesuffix(".weight")
            tensors |= {module + part: tensor for part, tensor in parts.items()}
        else:
            tensors[name] = _plain(values, "F32" if dtype == "F32" else recipe.plain)
            values = _values(tensors[name])
            if values.ndim == 2 and "embed_tokens" not in name:
                left_out.append(name.removesuffix(".weight"))
        twin[name] = Stored("F32", values)
    own = recipe.config | recipe.own_config
    if recipe.pack:
        own |= {"quantization_config": recipe.quantization(left_out)}
    folder = _write(label, recipe, tensors, own, recipe.plain)
    if recipe.plain == "F32":
        return Variant(folder, oracle_folder(recipe.base))
    return Variant(folder, _write(label + "-twin", recipe, twin, recipe.config, "F32"))


def _plain(values: np.ndarray, dtype: str) -> Stored:
    if dtype == "BF16":
        return Stored(dtype, to_bf16(values))
    return Stored(dtype, values.astype({"F16": np.float16, "F32": np.float32}[dtype]))


def _values(tensor: Stored) -> np.ndarray:
    if tensor.dtype == "BF16":
        return from_bf16(tensor.array)
    return tensor.array.astype(np.float32)


def _write(
    label: str, recipe: Recipe, tensors: dict[str, Stored], changes: dict[str, Any], dtype: str
) -> Path:
    source, folder = ORACLES / recipe.base, scratch_folder() / label
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config", None)
    config["torch_dtype"] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[dtype]
    (folder / "config.json").write_text(json.dumps(config | changes, indent=2) + "\n")
    if (source / "generation_config.json").exists():
        shutil.copyfile(source / "generation_config.json", folder / "generation_config.json")
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def _compressed(
    format: str, weights: dict[str, Any], ignore: list[str] | None = None
) -> Callable[[list[str]], dict[str, Any]]:
    """quantization_config of compressed-tensors; ``ignore`` in place of every name left out."""
    usual = {"actorder": None, "block_structure": None, "dynamic": False, "group_size": None}
    usual |= {"observer": "minmax", "observer_kwargs": {}, "symmetric": True}
    activations = usual | {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    activations["observer"] = None

    def quantization(left_out: list[str]) -> dict[str, Any]:
        group = {
            "input_activations": activations if format == "float-quantized" else None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": usual | weights,
        }
        return {
            "config_groups": {"group_0": group},
            "format": format,
            "ignore": left_out if ignore is None else ignore,
            "kv_cache_scheme": None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        }

    return quantization


def _awq_config(group: int) -> Callable[[list[str]], dict[str, Any]]:
    return lambda left_out: {
        "bits": 4,
        "group_size": group,
        "modules_to_not_convert": [name for name in left_out if name != "lm_head"] or None,
        "quant_method": "awq",
        "version": "gemm",
        "zero_point": True,
    }


def _gptq_config(group: int, act_order: bool) -> Callable[[list[str]], dict[str, Any]]:
    return lambda left_out: {
        "bits": 4,
        "checkpoint_format": "gptq",
        "damp_percent": 0.01,
        "desc_act": act_order,
        "group_size": group,
        "model_file_base_name": None,
        "model_name_or_path": None,
        "quant_method": "gptq",
        "static_groups": False,
        "sym": False,
        "true_sequential": True,
    }


_FP8_CHANNEL = _compressed(
    "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}
)
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
# As in Kimi-K2-Thinking: experts alone are quantised.
_KIMI_IGNORE = [
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
]


def _fp8(base: str, scale_dtype: str) -> Recipe:
    pack = partial(fp8_channel, scale_dtype=scale_dtype)
    return Recipe(base, pack=pack, quantization=_FP8_CHANNEL)


def _int4(base: str, shape_dtype: str = "I64", **more: Any) -> Recipe:
    more.setdefault("quantization", _compressed("pack-quantized", _INT4))
    pack = partial(int4_packed, group=32, shape_dtype=shape_dtype)
    return Recipe(base, pack=pack, group=32, **more)


def _awq(base: str, group: int) -> Recipe:
    pack = partial(awq, group=group)
    return Recipe(base, "F16", pack, group, quantization=_awq_config(group))


def _gptq(base: str, group: int, act_order: bool) -> Recipe:
    pack = partial(gptq, group=group, act_order=act_order)
    return Recipe(base, "F16", pack, group, quantization=_gptq_config(group, act_order))


# deepseek_v3_fp8_256 is the one with experts that divide by 32, and by 64; its kv_b_proj does not.
VARIANTS = {
    "glm4_moe-fp8-channel": _fp8("glm4_moe", "BF16"),
    "llama-fp8-channel": _fp8("llama", "F32"),
    "llama-int4": _int4("llama"),
    "deepseek_v3-int4": _int4("deepseek_v3_fp8_256"),
    "kimi_k2-int4-experts": _int4(
        "deepseek_v3_fp8_256",
        shape_dtype="I32",
        names=_EXPERTS,
        quantization=_compressed("pack-quantized", _INT4, _KIMI_IGNORE),
        config={"n_group": 1, "topk_group": 1},
        own_config={"model_type": "kimi_k2"},
    ),
    "qwen2-awq": _awq("qwen2", 32),
    "deepseek_v3-awq": _awq("deepseek_v3_fp8_256", 64),
    "llama-gptq": _gptq("llama", 32, act_order=False),
    "qwen2-gptq-act-order": _gptq("qwen2", 32, act_order=True),
    "qwen3_moe-gptq": _gptq("qwen3_moe", 16, act_order=False),
    "llama-f16": Recipe("llama", "F16"),
    "mixtral-f16": Recipe("mixtral", "F16"),
    "qwen3_moe-f32": Recipe("qwen3_moe", "F32"),
    "deepseek_v3-f32": Recipe("deepseek_v3_fp8_256", "F32"),
}
