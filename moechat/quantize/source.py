"""A checkpoint as layers: every tensor with the scales that belong to it, whatever its format."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from moechat.errors import ArchitectureUnsupported, CheckpointDamaged
from moechat.quantize.fp8 import BLOCK
from moechat.weights.mapped import Checkpoint, StoredTensor
from moechat.weights.safetensors_header import ELEMENT_BYTES, quoted

Storage = Literal["plain", "fp8_block", "fp8_channel", "int4", "mxfp4"]

MXFP4_GROUP = 32
_PLAIN = ("F32", "F16", "BF16")
_SCALES = ("F32", "F16", "BF16")
_METHODS = ("fp8", "compressed-tensors", "mxfp4")
_READABLE = (
    "BF16, F16, F32, FP8 e4m3 with a scale for 128x128 blocks or for rows, symmetric "
    "compressed-tensors INT4, MXFP4"
)
# Parts of formats that are not read here: beside a weight they would change what it means.
_FOREIGN_SUFFIXES = (
    ".g_idx",
    ".input_scale",
    ".qweight",
    ".qzeros",
    ".scales",
    ".weight_g_idx",
    ".weight_global_scale",
    ".weight_scale",
    ".weight_scale_2",
    ".weight_scale_inv",
    ".weight_zero_point",
)


@dataclass(frozen=True, slots=True)
class Layer:
    """One tensor of the model and how it is stored.

    ``name`` and ``shape`` are those it would have unquantised; ``scale`` is None for plain ones.
    ``stored_bytes`` counts all that belongs to it.
    """

    name: str
    shape: tuple[int, ...]
    storage: Storage
    weight: StoredTensor
    scale: StoredTensor | None
    stored_bytes: int

    @property
    def rows(self) -> int:
        """Rows when all dimensions but the last are seen as one."""
        return math.prod(self.shape[:-1])

    @property
    def cols(self) -> int:
        """Size of the last dimension; 1 for a scalar."""
        return self.shape[-1] if self.shape else 1


def tensor_bytes(tensor: StoredTensor) -> int:
    """Bytes of a tensor in its file."""
    return math.prod(tensor.shape) * ELEMENT_BYTES[tensor.dtype]


def check_method(config: dict[str, Any]) -> None:
    """Raises ArchitectureUnsupported when config.json declares a format that is not read here."""
    for key in ("quantization_config", "compression_config"):
        declared = config.get(key)
        if declared is None:
            continue
        method = declared.get("quant_method") if isinstance(declared, dict) else declared
        if method not in _METHODS and not (method is None and key == "compression_config"):
            raise ArchitectureUnsupported(
                f"config.json declares the weights as {ascii(method)[:80]}",
                f"quantize reads {_READABLE}",
            )


def read_layers(checkpoint: Checkpoint) -> list[Layer]:
    """All layers in the order of their bytes.

    Raises ArchitectureUnsupported for formats that are not read here and CheckpointDamaged for
    parts that are missing or do not fit, both naming the tensor.
    """
    tensors = checkpoint.tensors
    used: set[str] = set()
    layers = []
    for tensor in tensors.values():
        layer = _layer(tensor, tensors, used)
        if layer is not None:
            layers.append(layer)
    for name, tensor in tensors.items():
        if name not in used:
            raise _unreadable(tensor)
    return layers


def _layer(tensor: StoredTensor, tensors: dict[str, StoredTensor], used: set[str]) -> Layer | None:
    """The layer whose weight ``tensor`` is, if it is one; marks its parts as used."""
    name = tensor.name
    if tensor.dtype == "F8_E4M3":
        scale = tensors.get(name + "_scale_inv") or tensors.get(name + "_scale")
        if scale is None:
            raise CheckpointDamaged(
                f"{tensor.file} cannot be decoded", f"{quoted(name)} is FP8 and has no scale"
            )
        storage, shape = _fp8_storage(tensor, scale), tensor.shape
    elif name.endswith(".weight_packed"):
        name = name.removesuffix("_packed")
        scale = _part(tensor, tensors, name + "_scale")
        storage, shape = "int4", _int4_shape(tensor, scale, tensors, used)
    elif name.endswith("_blocks") and name.removesuffix("blocks") + "scales" in tensors:
        name = name.removesuffix("_blocks")
        scale = _part(tensor, tensors, name + "_scales")
        storage, shape = "mxfp4", _mxfp4_shape(tensor, scale)
    elif tensor.dtype in _PLAIN and not name.endswith(_FOREIGN_SUFFIXES):
        scale, storage, shape = None, "plain", tensor.shape
    else:
        return None
    parts = [tensor] if scale is None else [tensor, scale]
    if storage == "int4":
        parts.append(tensors[name + "_shape"])
    used.update(part.name for part in parts)
    return Layer(name, shape, storage, tensor, scale, sum(map(tensor_bytes, parts)))


def _fp8_storage(weight: StoredTensor, scale: StoredTensor) -> Storage:
    _check_type(scale, *_SCALES)
    if len(weight.shape) == 2:
        rows, cols = weight.shape
        if scale.shape == (-(-rows // BLOCK), -(-cols // BLOCK)):
            return "fp8_block"
        if scale.shape in ((rows, 1), (rows,)):
            return "fp8_channel"
    raise ArchitectureUnsupported(
        f"{scale.file} scales {quoted(weight.name)} in a way that quantize does not read",
        f"the weight has shape {list(weight.shape)} and the scale {list(scale.shape)}; a scale for "
        f"each block of 128x128 or for each row is read",
    )


def _int4_shape(
    packed: StoredTensor,
    scale: StoredTensor,
    tensors: dict[str, StoredTensor],
    used: set[str],
) -> tuple[int, int]:
    name = packed.name.removesuffix("_packed")
    declared = _part(packed, tensors, name + "_shape")
    _check_type(packed, "I32")
    _check_type(scale, *_SCALES)
    _check_type(declared, "I32", "I64")
    if declared.shape != (2,) or len(packed.shape) != 2 or len(scale.shape) != 2:
        raise _misfit(packed, "packed, scale and shape need 2, 2 and 1 dimensions")
    rows, cols = (int(size) for size in declared.array)
    groups = scale.shape[1]
    # Eight values an int32, and groups of whole int32: nothing else is symmetric INT4.
    if packed.shape != (rows, -(-cols // 8)) or cols % 8 or cols < 8:
        raise _misfit(packed, f"it should hold 4-bit values of shape [{rows}, {cols}]")
    if scale.shape[0] != rows or not groups or cols % groups or cols // groups % 8:
        raise _misfit(scale, f"the values have shape [{rows}, {cols}]")
    return rows, cols


def _mxfp4_shape(blocks: StoredTensor, scales: StoredTensor) -> tuple[int, int, int]:
    """Blocks [experts, outputs, groups, 16] hold the transpose of [experts, inputs, outputs]."""
    _check_type(blocks, "U8")
    _check_type(scales, "U8")
    if len(blocks.shape) != 4 or blocks.shape[3] != MXFP4_GROUP // 2:
        raise _misfit(blocks, "MXFP4 blocks have shape [experts, outputs, groups, 16]")
    if scales.shape != blocks.shape[:3]:
        raise _misfit(scales, f"the blocks have shape {list(blocks.shape)}")
    experts, outputs, groups, _ = blocks.shape
    return experts, groups * MXFP4_GROUP, outputs


def _part(tensor: StoredTensor, tensors: dict[str, StoredTensor], name: str) -> StoredTensor:
    part = tensors.get(name)
    if part is None:
        raise CheckpointDamaged(
            f"{tensor.file} cannot be decoded", f"{quoted(tensor.name)} has no {quoted(name)}"
        )
    return part


def _check_type(tensor: StoredTensor, *allowed: str) -> None:
    if tensor.dtype not in allowed:
        raise ArchitectureUnsupported(
            f"{tensor.file} stores {quoted(tensor.name)} as {tensor.dtype}",
            f"quantize reads {' or '.join(allowed)} there",
        )


def _misfit(tensor: StoredTensor, why: str) -> CheckpointDamaged:
    return CheckpointDamaged(
        f"{tensor.file} cannot be decoded",
        f"{quoted(tensor.name)} has shape {list(tensor.shape)}; {why}",
    )


def _unreadable(tensor: StoredTensor) -> ArchitectureUnsupported:
    return ArchitectureUnsupported(
        f"{tensor.file} holds {quoted(tensor.name)} ({tensor.dtype} {list(tensor.shape)}), "
        f"which quantize cannot read",
        f"it reads {_READABLE}",
    )
