"""What will be written: for every layer how, into which file, at which byte. Known to the last byte
from the source's headers alone, before anything is read or written."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from moechat.errors import ArchitectureUnsupported
from moechat.models.bounds import MAX_COLUMNS
from moechat.quantize.fp8 import BLOCK
from moechat.quantize.int4 import GROUP
from moechat.quantize.kinds import is_matrix, is_stacked_experts, module_of
from moechat.quantize.source import MXFP4_GROUP, Layer
from moechat.weights.mapped import StoredTensor
from moechat.weights.safetensors_header import ELEMENT_BYTES, quoted

TargetFormat = Literal["int4", "fp8", "bf16"]
Action = Literal["copy", "int4", "fp8", "bf16"]

SHARD_BYTES = 5_000_000_000
# Weights that are worked on at once, and bytes that are copied at once.
_CHUNK_WEIGHTS = 1 << 18
_CHUNK_BYTES = 8 << 20


class OutputTensor(NamedTuple):
    """A tensor of a file that is written; ``begin_byte`` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin_byte: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


class Task(NamedTuple):
    """A piece of work on one layer: rows [begin, end) to encode, or bytes of part ``part`` to copy.

    ``part`` is None when the layer is encoded; otherwise an index into its outputs.
    """

    layer_index: int
    part: int | None
    begin: int
    end: int


@dataclass(slots=True)
class LayerPlan:
    """What becomes of a layer. ``outputs``: the weight, its scale, its shape, as far as needed."""

    layer: Layer
    action: Action
    outputs: list[OutputTensor]
    shard: int = 0

    @property
    def written_bytes(self) -> int:
        """Bytes of all its outputs."""
        return sum(output.num_bytes for output in self.outputs)


@dataclass(frozen=True, slots=True)
class Shard:
    """A file that is written: its name, its header with the length before it, its size."""

    name: str
    header: bytes
    file_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole of the new checkpoint's weights.

    ``unquantised`` are the modules that a reader could take for quantised linear layers and that
    are not; ``left`` those of them that only their shape excludes.
    """

    to: TargetFormat
    layers: list[LayerPlan]
    shards: list[Shard]
    unquantised: list[str]
    left: list[str]

    def tasks(self, layer_index: int) -> Iterator[Task]:
        """The pieces of work on one layer; the same wherever and however often it runs."""
        plan = self.layers[layer_index]
        layer = plan.layer
        if plan.action == "copy":
            for part, output in enumerate(plan.outputs[:2]):
                for begin in range(0, output.num_bytes, _CHUNK_BYTES):
                    end = min(begin + _CHUNK_BYTES, output.num_bytes)
                    yield Task(layer_index, part, begin, end)
            return
        step = max(_CHUNK_WEIGHTS // max(layer.cols, 1), 1)
        stretch = layer.rows
        if layer.storage == "mxfp4":
            step, stretch = _whole(step, MXFP4_GROUP), layer.shape[1]
        elif plan.action == "fp8" or step > BLOCK:
            step = _whole(step, BLOCK)
        for start in range(0, layer.rows, stretch):
            for begin in range(start, start + stretch, step):
                yield Task(layer_index, None, begin, min(begin + step, start + stretch))


def make_plan(layers: list[Layer], to: TargetFormat, shard_bytes: int = SHARD_BYTES) -> Plan:
    """Decide about every layer. Raises ArchitectureUnsupported for what the format cannot hold."""
    plans = [_layer_plan(layer, to) for layer in layers]
    kept = [plan for plan in plans if not _is_quantised(plan, to)]
    unquantised, left = [], []
    for plan in kept:
        name, num_dimensions = plan.layer.name, len(plan.layer.shape)
        module = module_of(name, num_dimensions)
        if module is not None:
            unquantised.append(module)
            if is_matrix(name, num_dimensions) and to != "bf16":
                left.append(name)
    quantised = {plan.layer.name for plan in plans if _is_quantised(plan, to)}
    # A head that is tied to the embedding has no tensor but is a linear layer to readers.
    if "lm_head.weight" not in quantised and "lm_head" not in unquantised:
        unquantised.insert(0, "lm_head")
    return Plan(to, plans, _lay_out(plans, shard_bytes), unquantised, left)


def _layer_plan(layer: Layer, to: TargetFormat) -> LayerPlan:
    action = _action(layer, to)
    if action != "copy" and layer.cols > MAX_COLUMNS:
        raise ArchitectureUnsupported(
            f"{quoted(layer.name)} has {layer.cols} columns", f"quantize takes up to {MAX_COLUMNS}"
        )
    name, shape = layer.name, layer.shape
    if action == "bf16":
        return LayerPlan(layer, action, [OutputTensor(name, "BF16", shape)])
    if action == "copy" and layer.scale is None:
        return LayerPlan(layer, action, [OutputTensor(name, layer.weight.dtype, shape)])
    rows, cols = shape
    if to == "int4":
        outputs = [
            OutputTensor(name + "_packed", "I32", (rows, cols // 8)),
            OutputTensor(name + "_scale", "BF16", (rows, cols // GROUP)),
            OutputTensor(name + "_shape", "I64", (2,)),
        ]
    else:
        grid = (-(-rows // BLOCK), -(-cols // BLOCK))
        outputs = [
            OutputTensor(name, "F8_E4M3", shape),
            OutputTensor(name + "_scale_inv", "F32", grid),
        ]
    return LayerPlan(layer, action, outputs)


def _action(layer: Layer, to: TargetFormat) -> Action:
    """ "copy" what already is as it should be, quantise the matrices, decode the rest to BF16."""
    num_dimensions = len(layer.shape)
    if to != "bf16" and is_stacked_experts(layer.name, num_dimensions):
        raise ArchitectureUnsupported(
            f"{quoted(layer.name)} holds all experts of a layer in one tensor",
            f"that is not a layout the public {to} format has",
            "Use --to bf16",
        )
    scale = layer.scale
    matrix = is_matrix(layer.name, num_dimensions) and 0 not in layer.shape
    if to == "int4":
        if layer.storage == "int4" and _has_format(scale, "BF16", layer.cols // GROUP):
            return "copy"
        if matrix and layer.cols % GROUP == 0:
            return "int4"
    elif to == "fp8":
        if layer.storage == "fp8_block" and _has_format(scale, "F32"):
            return "copy"
        if matrix:
            return "fp8"
    elif matrix and layer.weight.dtype != "BF16":
        return "bf16"
    return "copy" if layer.storage == "plain" else "bf16"


def _has_format(scale: StoredTensor | None, dtype: str, cols: int | None = None) -> bool:
    """Whether a scale is stored as the target format has it, down to the number of columns."""
    return scale is not None and scale.dtype == dtype and cols in (None, scale.shape[-1])


def _is_quantised(plan: LayerPlan, to: TargetFormat) -> bool:
    """Whether the layer ends up in the target format."""
    return to != "bf16" and len(plan.outputs) > 1


def _lay_out(plans: list[LayerPlan], shard_bytes: int) -> list[Shard]:
    """Give every layer a file and every output a place in it; returns the files."""
    members: list[list[LayerPlan]] = [[]]
    filled_bytes = 0
    for plan in plans:
        if members[-1] and filled_bytes + plan.written_bytes > shard_bytes:
            members.append([])
            filled_bytes = 0
        plan.shard = len(members) - 1
        members[-1].append(plan)
        filled_bytes += plan.written_bytes
    total = len(members)
    names = [f"model-{number:05}-of-{total:05}.safetensors" for number in range(1, total + 1)]
    if total == 1:
        names = ["model.safetensors"]
    return [_shard(name, group) for name, group in zip(names, members)]


def _shard(name: str, plans: list[LayerPlan]) -> Shard:
    """The header of one file; sets ``begin_byte`` of its outputs."""
    slots = [(plan, part) for plan in plans for part in range(len(plan.outputs))]
    # The widest elements first: then every tensor is aligned to its own.
    slots.sort(key=lambda slot: -ELEMENT_BYTES[slot[0].outputs[slot[1]].dtype])
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for plan, part in slots:
        output = plan.outputs[part]
        end = position + output.num_bytes
        entries[output.name] = {
            "dtype": output.dtype,
            "shape": list(output.shape),
            "data_offsets": [position, end],
        }
        plan.outputs[part] = output._replace(begin_byte=position)
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    for plan, part in slots:
        output = plan.outputs[part]
        plan.outputs[part] = output._replace(begin_byte=output.begin_byte + len(header))
    return Shard(name, header, len(header) + position)


def _whole(step: int, unit: int) -> int:
    """``step`` rounded down to a multiple of ``unit``, at least one."""
    return max(step // unit, 1) * unit
