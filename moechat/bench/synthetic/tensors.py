"""What a synthetic checkpoint stores: the parts of every tensor, in real formats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from moechat.bench.synthetic.config import Shape, config_of
from moechat.errors import Usage
from moechat.models.architectures import read_spec, tensor_table
from moechat.models.spec import TensorSpec

Precision = Literal["bf16", "f32", "fp8_block", "int4_group32", "mxfp4"]
# As --format calls them.
FORMATS: dict[str, Precision] = {
    "fp8": "fp8_block",
    "int4": "int4_group32",
    "bf16": "bf16",
    "mxfp4": "mxfp4",
}
# What bytes of a part are made of; "scale" is one value throughout.
Kind = Literal["bf16", "fp8", "int4", "mxfp4", "ones", "zeros", "scale"]
BLOCK, GROUP = 128, 32
_WIDTHS = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "I32": 4, "U8": 1}


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a safetensors file. ``role`` is that of the model's tensor it belongs to.

    Its weights, scales applied, should have the root mean square ``rms``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: Kind
    role: str
    rms: float = 1.0

    @property
    def num_bytes(self) -> int:
        """Stored bytes."""
        return math.prod(self.shape) * _WIDTHS[self.dtype]

    @property
    def layer(self) -> int | None:
        """The layer it belongs to; None for embedding, last norm and head."""
        words = self.role.split(".")
        return int(words[1]) if words[0] == "layers" else None


@dataclass(frozen=True, slots=True)
class Recipe:
    """The format of each group of tensors, from an entry's precision and ``--format``."""

    precisions: dict[str, Precision]
    label: str

    @classmethod
    def of(cls, shape: Shape, override: str | None = None) -> Recipe:
        """``override`` is one of FORMATS: every linear layer, embedding, head and router excepted.

        Raises Usage where no public format has such tensors.
        """
        groups: dict[str, Any] = dict(shape.entry.get("precision", {}))
        linear = groups.get("linear", "bf16")
        routed = groups.get("experts", linear)
        if override is not None:
            wanted = FORMATS[override]
            if wanted == "mxfp4" and not shape.stacks_experts:
                raise Usage(
                    f"{shape.name} cannot be built in mxfp4",
                    "checkpoints store MXFP4 in gpt-oss' stacked experts only",
                )
            if shape.stacks_experts and wanted in ("fp8_block", "int4_group32"):
                raise Usage(
                    f"{shape.name} cannot be built in {override}",
                    "no checkpoint format has stacked experts in it",
                )
            routed = wanted
            linear = "bf16" if wanted == "mxfp4" else wanted
        labels = {value: key for key, value in FORMATS.items()}
        if routed not in labels or linear not in labels:
            raise Usage(f"models.toml gives {shape.name} a precision that cannot be built")
        precisions = {"linear": linear, "experts": routed}
        return cls(cast("dict[str, Precision]", precisions), labels[cast("Precision", routed)])

    def quantization_config(self) -> dict[str, Any] | None:
        """What config.json must say; None for nothing."""
        used = set(self.precisions.values())
        if "fp8_block" in used:
            return {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [BLOCK, BLOCK],
            }
        if "int4_group32" in used:
            weights = {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": GROUP,
            }
            group = {"targets": ["Linear"], "weights": weights}
            return {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"group_0": group},
            }
        return {"quant_method": "mxfp4"} if "mxfp4" in used else None

    def parts(self, tensor: TensorSpec) -> list[Part]:
        """The stored parts of one tensor of the model's table."""
        name, shape, role = tensor.name, tensor.shape, tensor.role
        if len(shape) == 1 or (tensor.stacked and not tensor.matrix):
            return [_vector(tensor)]
        inputs = shape[-2] if tensor.transposed else shape[-1]
        # x of size one stays so; embedding rows are of size one themselves.
        rms = 1.0 if role == "embedding" else inputs**-0.5
        precision: Precision = "bf16"
        if role == "head":
            precision = self.precisions.get("head", "bf16")
        elif tensor.matrix:
            precision = self.precisions["experts" if ".experts." in role else "linear"]
        module = name.removesuffix(".weight")
        if precision == "fp8_block":
            grid = tuple(-(-size // BLOCK) for size in shape)
            return [
                Part(name, "F8_E4M3", shape, "fp8", role, rms),
                Part(name + "_scale_inv", "F32", grid, "scale", role, rms),
            ]
        if precision == "int4_group32" and inputs % GROUP == 0:
            rows = shape[0]
            return [
                Part(module + ".weight_packed", "I32", (rows, inputs // 8), "int4", role, rms),
                Part(module + ".weight_scale", "BF16", (rows, inputs // GROUP), "scale", role, rms),
            ]
        if precision == "mxfp4":
            outputs = shape[-1] if tensor.transposed else shape[-2]
            grid = (shape[0], outputs, inputs // GROUP)
            return [
                Part(name + "_blocks", "U8", (*grid, GROUP // 2), "mxfp4", role, rms),
                Part(name + "_scales", "U8", grid, "scale", role, rms),
            ]
        return [Part(name, "BF16", shape, "bf16", role, rms)]


def _vector(tensor: TensorSpec) -> Part:
    """Norms are ones and biases zeros; DeepSeek-V3's correction is float32."""
    if tensor.role.endswith("router_correction"):
        return Part(tensor.name, "F32", tensor.shape, "zeros", tensor.role)
    kind: Kind = "ones" if tensor.role.endswith("norm") else "zeros"
    return Part(tensor.name, "BF16", tensor.shape, kind, tensor.role)


def stored_parts(shape: Shape, recipe: Recipe) -> list[Part]:
    """Every stored tensor of a model of this shape, in order of layers.

    Raises ArchitectureUnsupported for counts that no such model can have.
    """
    config = config_of(shape)
    table = tensor_table(read_spec(config, {}), config)
    return [part for tensor in table for part in recipe.parts(tensor)]


def total_bytes(parts: Iterable[Part]) -> int:
    """Stored bytes of all parts."""
    return sum(part.num_bytes for part in parts)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a model by what can be cut.

    ``fixed``: embedding, last norm and head. ``moe``: a layer without its experts and what belongs
    to each of them (``expert``: router row included).
    """

    fixed: int
    dense: int
    moe: int
    expert: int

    @classmethod
    def of(cls, shape: Shape, recipe: Recipe) -> Sizes:
        """Of a shape's dimensions and vocabulary; its numbers of layers and experts do not matter.

        Dense is 0 for a model that has no such layers.
        """
        groups, dense, few = shape.groups, shape.dense_layers > 0, least_experts(shape)

        def layers(experts: int) -> dict[int | None, int]:
            small = shape.cut(dense_layers=int(dense), moe_layers=1, experts=experts)
            return _by_layer(stored_parts(small, recipe))

        one, two = layers(few), layers(few + groups)
        last = int(dense)
        expert = (two[last] - one[last]) // groups
        return cls(one[None], one[0] if dense else 0, one[last] - few * expert, expert)

    def total(self, dense_layers: int, moe_layers: int, experts: int) -> int:
        """Bytes of a model with so many layers, and experts in each."""
        layer = self.moe + experts * self.expert
        return self.fixed + dense_layers * self.dense + moe_layers * layer


def least_experts(shape: Shape) -> int:
    """The fewest experts that can be routed to: whole groups, two in each, k in those kept."""
    chosen, kept = shape.geometry["num_experts_per_token"], shape.geometry["num_groups_kept"]
    in_group = max(-(-chosen // max(kept, 1)), 2 if shape.groups > 1 else 1)
    return int(in_group * shape.groups)


def _by_layer(parts: Sequence[Part]) -> dict[int | None, int]:
    sums: dict[int | None, int] = {}
    for part in parts:
        sums[part.layer] = sums.get(part.layer, 0) + part.num_bytes
    return sums


def by_file(parts: Sequence[Part]) -> Iterator[tuple[str, list[Part]]]:
    """The parts of each safetensors file, with its name: a layer a file, the rest in one."""
    files: dict[int | None, list[Part]] = {}
    for part in parts:
        files.setdefault(part.layer, []).append(part)
    for layer, held in files.items():
        yield ("outside.safetensors" if layer is None else f"layer-{layer:04}.safetensors"), held
