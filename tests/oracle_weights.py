"""The weights of the oracle folders, made again from seeds, so that git need not carry them.

A folder of fixtures/oracle holds what transformers computed, and manifest.json: the salt of its
random numbers, gains that differ from the usual ones, and for each file the tensors in it as
``name: [dtype, shape, first 16 hex digits of the SHA-256 of its bytes]``. A tensor's values depend
on its folder's salt and its name alone; the files come out byte for byte as they were when the
expected outputs were computed.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from oracle_formats import (
    FP8_BLOCK,
    MXFP4_GROUP,
    Stored,
    quantise_fp8_blocks,
    quantise_mxfp4,
    spread,
    to_bf16,
    write_safetensors,
)

INDEX_NAME = "model.safetensors.index.json"
SCALE_SUFFIX = "_scale_inv"

# Matrices by the end of their names: values have the deviation gain / sqrt(inputs), the gain by
# this key of the manifest, or else the number here.
_MATRICES = (
    (r"(lm_head|shared_head\.head)", "lm_head", 3.5),
    (r"(mlp\.gate|mlp\.router|block_sparse_moe\.gate)", "router", 1.6),
    (r"shared_expert_gate", "shared_expert_gate", 1.5),
    (r"(q_proj|k_proj|q_b_proj|kv_a_proj_with_mqa)", "qk", 1.1),
    (r"(q_a_proj|kv_b_proj|v_proj)", "v", 1.1),
    (r"o_proj", "o", 1.3),
    (r"(gate_proj|up_proj|w1|w3)", "ffn_in", 1.2),
    (r"experts\.\d+\.(down_proj|w2)", "expert_down", 1.4),
    (r"down_proj", "ffn_down", 1.2),
    (r"eh_proj", "eh_proj", 1.0),
)


def remake_folder(source: Path, target: Path) -> Path:
    """The complete model folder ``target`` of a fixture folder; returns ``target``."""
    target.mkdir()
    for file in source.iterdir():
        if file.name != "manifest.json":
            shutil.copyfile(file, target / file.name)
    manifest = json.loads((source / "manifest.json").read_text())
    files = remake_tensors(json.loads((source / "config.json").read_text()), manifest)
    for name, tensors in files.items():
        write_safetensors(target / name, tensors)
    if len(files) > 1:
        owners = {name: file for file, tensors in files.items() for name in tensors}
        total = sum(t.array.nbytes for tensors in files.values() for t in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(owners.items()))}
        (target / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
    return target


def remake_tensors(
    config: dict[str, Any], manifest: dict[str, Any]
) -> dict[str, dict[str, Stored]]:
    """Every tensor of every file: file name -> tensor name -> stored bits."""
    listed = {name: entry for file in manifest["files"].values() for name, entry in file.items()}
    made: dict[str, Stored] = {}
    for name, (dtype, shape, _) in listed.items():
        if name.endswith("_blocks"):
            made.update(_mxfp4(name.removesuffix("_blocks"), shape, config, manifest))
        elif dtype == "F8_E4M3":
            made.update(_fp8(name, shape, config, manifest))
        elif not name.endswith(("_scales", SCALE_SUFFIX)):
            values = initial_values(name, shape, config, manifest)
            made[name] = Stored(dtype, values if dtype == "F32" else to_bf16(values))
    return {
        file: {name: made[name] for name in tensors} for file, tensors in manifest["files"].items()
    }


def digest(tensor: Stored) -> str:
    return hashlib.sha256(np.ascontiguousarray(tensor.array).tobytes()).hexdigest()[:16]


def initial_values(
    name: str, shape: list[int], config: dict[str, Any], manifest: dict[str, Any]
) -> np.ndarray:
    """float32 values [*shape] of the tensor with this name in the checkpoint, before rounding.

    Every operation is in float32 and in this order: another order would round otherwise.
    """
    gains = manifest["gains"]
    z = _random(manifest["salt"], name).standard_normal(shape, np.float32)
    gemma = config["model_type"].startswith("gemma")
    tied = config.get("tie_word_embeddings", gemma)
    if name.endswith("e_score_correction_bias"):
        return z * gains.get("e_bias", 0.15)
    if name.endswith("sinks"):
        return 0.5 + 1.5 * z
    if name.endswith("norm.weight"):
        mean, deviation = _norm(name, gemma, tied, gains)
        return mean + deviation * z
    if name.endswith("bias"):
        return z * gains.get("bias", 0.4)
    if name.endswith("embed_tokens.weight"):
        return z * (gains.get("embed_tied", 0.7) / math.sqrt(config["hidden_size"])) if tied else z
    if name.endswith("experts.gate_up_proj"):  # [experts, inputs, outputs], as is the next
        return z * gains.get("gate_up", 2.2) / math.sqrt(shape[1])
    if name.endswith("experts.down_proj"):
        return z * gains.get("down", 0.5) / math.sqrt(shape[1])
    for pattern, key, usual in _MATRICES:
        if re.search(rf"(^|\.){pattern}\.weight$", name):
            return z * gains.get(key, usual) * (1.0 / math.sqrt(shape[-1]))
    raise KeyError(name)


def _norm(name: str, gemma: bool, tied: bool, gains: dict[str, float]) -> tuple[float, float]:
    """Mean and deviation of a norm's weights; gemma's are added to 1 by the model."""
    if name == "model.norm.weight" and (gemma or tied):
        return gains.get("final_norm", 5.0), 0.25 if gemma else 0.2
    if gemma:
        return 0.6 if "post_" in name else 0.0, 0.25
    return 1.1 if name.endswith((".q_norm.weight", ".k_norm.weight")) else 1.0, 0.2


def _random(*key: str) -> np.random.Generator:
    """PCG64 seeded by the SHA-256 of the key's parts, joined by the unit separator."""
    words = np.frombuffer(hashlib.sha256("\x1f".join(key).encode()).digest(), "<u4")
    return np.random.Generator(np.random.PCG64(words.tolist()))


def _fp8(
    name: str, shape: list[int], config: dict[str, Any], manifest: dict[str, Any]
) -> dict[str, Stored]:
    """A matrix in FP8; a random factor a block lets a wrong scale index be seen."""
    rows, cols = shape
    grid = (-(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK))
    powers = _random(manifest["salt"], name, "blockfactor").uniform(-1.0, 0.6, grid)
    factor = np.exp2(powers).astype(np.float32)
    weight = initial_values(name, shape, config, manifest)
    codes, scale = quantise_fp8_blocks(weight * spread(factor, rows, cols, (FP8_BLOCK, FP8_BLOCK)))
    return {name: Stored("F8_E4M3", codes), name + SCALE_SUFFIX: Stored("F32", scale)}


def _mxfp4(
    name: str, blocks_shape: list[int], config: dict[str, Any], manifest: dict[str, Any]
) -> dict[str, Stored]:
    """All experts' matrices in MXFP4, stored [experts, outputs, inputs / 32, 16]."""
    experts, outputs, groups, _ = blocks_shape
    inputs = groups * MXFP4_GROUP
    weight = initial_values(name, [experts, inputs, outputs], config, manifest).transpose(0, 2, 1)
    random = _random(manifest["salt"], name, "blockfactor")
    factor = np.exp2(random.integers(-2, 2, (experts, outputs, groups))).astype(np.float32)
    nibbles, scales = quantise_mxfp4(weight * factor.repeat(MXFP4_GROUP, -1))
    return {name + "_blocks": Stored("U8", nibbles), name + "_scales": Stored("U8", scales)}
