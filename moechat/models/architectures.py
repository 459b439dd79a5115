"""From a checkpoint folder to a model: which architecture, its dimensions, its tensors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from moechat.errors import ArchitectureUnsupported, CheckpointDamaged, ModelNotFound
from moechat.json_file import read_json_object
from moechat.models.spec import (
    BoundTensor,
    Format,
    ModelSpec,
    TensorSource,
    TensorSpec,
    TensorView,
)

# config.json's architecture string: the folder of this package that implements it
_FOLDERS = {"DeepseekV3ForCausalLM": "deepseek_v3"}
_FORMATS: dict[str, Format] = {"F32": "f32", "BF16": "bf16", "F8_E4M3": "fp8_block"}
_BLOCK = 128
_CONFIG_LIMIT_BYTES = 16_000_000
_LISTED = 3


def load_spec(folder: Path) -> ModelSpec:
    """The dimensions of the model in a folder of Hugging Face layout.

    Raises ModelNotFound without config.json, CheckpointDamaged when it cannot be read,
    ArchitectureUnsupported when moechat cannot compute what it asks for.
    """
    path = folder / "config.json"
    if not os.path.lexists(path):
        why = "it has no config.json" if os.path.isdir(folder) else "there is no such folder"
        raise ModelNotFound(f"{folder} is not a model folder", why)
    config = read_json_object(path, _CONFIG_LIMIT_BYTES)
    generation_path = folder / "generation_config.json"
    generation = (
        read_json_object(generation_path, _CONFIG_LIMIT_BYTES)
        if os.path.lexists(generation_path)
        else {}
    )
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    for name in names:
        if isinstance(name, str) and name in _FOLDERS:
            spec: ModelSpec = _module(name, "spec").read_spec(config, generation)
            return spec
    raise ArchitectureUnsupported(
        f"{path} asks for the architecture {ascii(architectures)[:120]}",
        f"moechat implements {', '.join(sorted(_FOLDERS))}",
    )


def bind_tensors(spec: ModelSpec, checkpoint: TensorSource) -> dict[str, BoundTensor]:
    """Every tensor of the model by role, each with a shape and a type that fit.

    Raises CheckpointDamaged for missing, left-over or misshapen tensors, ArchitectureUnsupported
    for element types that have no kernel.
    """
    tensors = _module(spec.architecture, "tensors")
    table: list[TensorSpec] = tensors.tensor_table(spec)
    stored = checkpoint.tensors
    bound: dict[str, BoundTensor] = {}
    used: set[str] = set()
    missing: list[str] = []
    for entry in table:
        weight = stored.get(entry.name)
        if weight is None:
            missing.append(entry.name)
            continue
        used.add(entry.name)
        if weight.shape != entry.shape:
            raise _misshapen(weight, entry.shape)
        format_ = _FORMATS.get(weight.dtype)
        if format_ is None or format_ not in entry.formats:
            raise ArchitectureUnsupported(
                f"{weight.file} stores {weight.name!a} as {weight.dtype}",
                f"moechat computes with {', '.join(entry.formats)} there",
            )
        scale = None
        if format_ == "fp8_block" and entry.scale is not None:
            scale = stored.get(entry.scale)
            if scale is None:
                missing.append(entry.scale)
                continue
            used.add(entry.scale)
            _check_scale(scale, entry.shape)
        bound[entry.role] = BoundTensor(entry, weight, scale, format_)
    left_over = [name for name in stored if name not in used and not tensors.is_skipped(spec, name)]
    if missing or left_over:
        parts = [_listing("missing", missing), _listing("not expected", left_over)]
        raise CheckpointDamaged(
            f"the weights are not those that config.json describes ({spec.architecture})",
            "; ".join(part for part in parts if part),
        )
    return bound


def _module(architecture: str, name: str) -> Any:
    return import_module(f"moechat.models.{_FOLDERS[architecture]}.{name}")


def _check_scale(scale: TensorView, weight_shape: tuple[int, ...]) -> None:
    """One float32 for each 128x128 block, the last block of a row or column being ragged."""
    grid = tuple(-(-size // _BLOCK) for size in weight_shape)
    if scale.shape != grid:
        raise _misshapen(scale, grid)
    if scale.dtype != "F32":
        raise ArchitectureUnsupported(
            f"{scale.file} stores {scale.name!a} as {scale.dtype}",
            "moechat computes with f32 block scales",
        )


def _misshapen(tensor: TensorView, expected: tuple[int, ...]) -> CheckpointDamaged:
    return CheckpointDamaged(
        f"{tensor.file} does not fit config.json",
        f"{tensor.name!a} has shape {list(tensor.shape)} and should have {list(expected)}",
    )


def _listing(label: str, names: Sequence[str]) -> str:
    """ "label: the first few names and how many more", or "" for none."""
    if not names:
        return ""
    shown = ", ".join(ascii(name[:120]) for name in names[:_LISTED])
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{len(names)} {label}: {shown}{more}"
