"""The files of a model folder besides its weights: which are copied, and config.json's changes."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from moechat.errors import CheckpointDamaged, ModelNotFound, Usage
from moechat.json_file import read_json_object
from moechat.quantize.fp8 import BLOCK
from moechat.quantize.int4 import GROUP
from moechat.quantize.plan import Plan
from moechat.quantize.target import JOURNAL_NAME, PART_SUFFIX
from moechat.weights.mapped import Checkpoint

CONFIG_NAME = "config.json"
_CONFIG_LIMIT_BYTES = 16_000_000
# Weights, in whatever format: those of the source are replaced, others would contradict them.
_WEIGHT_SUFFIXES = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".pt",
    ".pth",
)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json. Raises ModelNotFound without one, Usage for an unfinished result of this."""
    if os.path.lexists(folder / JOURNAL_NAME):
        raise Usage(
            f"{folder} is no source",
            "it is an unfinished result of quantize",
            "Finish it first, with the command that began it",
        )
    if not os.path.lexists(folder / CONFIG_NAME):
        raise ModelNotFound(f"{folder} is not a model folder", f"it has no {CONFIG_NAME}")
    return read_json_object(folder / CONFIG_NAME, _CONFIG_LIMIT_BYTES)


def other_files(folder: Path) -> list[Path]:
    """The files that are copied as they are: all of the folder itself but weights and config."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_file())
    skipped = (*_WEIGHT_SUFFIXES, PART_SUFFIX)
    return [
        folder / name
        for name in names
        if not name.startswith(".") and not name.endswith(skipped) and name != CONFIG_NAME
    ]


def source_identity(checkpoint: Checkpoint, files: list[Path]) -> str:
    """A hash of what identifies the source: names, sizes and times of all files, and all headers.

    Raises CheckpointDamaged when a file is gone.
    """
    digest = hashlib.sha256()
    contents = {tensor.file: tensor.file_content for tensor in checkpoint.tensors.values()}
    for path in (*contents, checkpoint.folder / CONFIG_NAME, *files):
        try:
            status = path.stat()
        except OSError as error:
            raise CheckpointDamaged(f"{path} cannot be read", error.strerror or "") from None
        digest.update(f"{path.name!a} {status.st_size} {status.st_mtime_ns}\n".encode())
    for content in contents.values():
        header_bytes = int.from_bytes(content[:8].tobytes(), "little")
        digest.update(content[: 8 + header_bytes].data)
    return digest.hexdigest()


def new_config(config: dict[str, Any], plan: Plan) -> bytes:
    """config.json for the new weights, as bytes."""
    changed = {
        key: value
        for key, value in config.items()
        if key not in ("quantization_config", "compression_config")
    }
    if plan.to == "bf16":
        for key in ("torch_dtype", "dtype"):
            if key in changed:
                changed[key] = "bfloat16"
    else:
        build = _int4_config if plan.to == "int4" else _fp8_config
        changed["quantization_config"] = build(plan.unquantised)
    return (json.dumps(changed, indent=2, ensure_ascii=False) + "\n").encode()


def new_index(plan: Plan) -> bytes:
    """model.safetensors.index.json for the new weights, as bytes."""
    weight_map = {
        output.name: plan.shards[layer.shard].name
        for layer in plan.layers
        for output in layer.outputs
    }
    total_bytes = sum(layer.written_bytes for layer in plan.layers)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    return (json.dumps(index, indent=2) + "\n").encode()


def _int4_config(unquantised: list[str]) -> dict[str, Any]:
    """As the public compressed-tensors checkpoints have it."""
    weights: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": GROUP,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "group",
        "symmetric": True,
        "type": "int",
    }
    group = {
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": "pack-quantized",
        "ignore": unquantised,
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _fp8_config(unquantised: list[str]) -> dict[str, Any]:
    """As the public DeepSeek-V3 and Qwen3 checkpoints have it."""
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": unquantised,
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    }
