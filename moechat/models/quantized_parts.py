"""The stored parts of one tensor of the model: its values, and scales and zero points if any.

Every storage format of a linear layer X is recognised by the names and types that are stored:

    X.weight                                 F32, F16, BF16
    X.weight (F8_E4M3), X.weight_scale_inv   FP8 with a grid of scales, one a block
    X.weight (F8_E4M3), X.weight_scale       FP8 with a scale a row, a block, or one in all
    X.weight_packed, X.weight_scale          compressed-tensors INT4 [rows, cols / 8]
    X.qweight, X.qzeros, X.scales            AWQ [inputs, outputs / 8]
    X.qweight, X.qzeros, X.scales, X.g_idx   GPTQ [inputs / 8, outputs]
    X_blocks, X_scales                       MXFP4 [experts, rows, cols / 32, 16]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from moechat.errors import ArchitectureUnsupported, CheckpointDamaged
from moechat.models.quantization import Quantization
from moechat.models.spec import BoundTensor, Format, TensorSpec, TensorView

_PLAIN: dict[str, Format] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_PACK = 8  # nibbles of an int32
_MXFP4_COLS = 32


class StoredParts:
    """Tensors of a checkpoint by name; remembers which were taken and which are missing."""

    def __init__(self, tensors: Mapping[str, TensorView]) -> None:
        self._tensors = tensors
        self.missing: list[str] = []
        self.taken: set[str] = set()

    def look(self, name: str) -> TensorView | None:
        """The tensor, or None; it does not count as taken."""
        return self._tensors.get(name)

    def find(self, name: str) -> TensorView | None:
        """The tensor, or None."""
        tensor = self._tensors.get(name)
        if tensor is not None:
            self.taken.add(name)
        return tensor

    def need(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> TensorView | None:
        """The tensor, its shape and type checked, or None and noted as missing."""
        tensor = self.find(name)
        if tensor is None:
            self.missing.append(name)
        else:
            _check(tensor, shape, dtypes)
        return tensor


def bind_tensor(
    spec: TensorSpec, parts: StoredParts, quantization: Quantization
) -> BoundTensor | None:
    """The parts of one tensor; None when some are missing, which ``parts`` then knows.

    Raises CheckpointDamaged for shapes that do not fit, ArchitectureUnsupported for types without
    a kernel and for quantisation that config.json does not describe.
    """
    weight = parts.find(spec.name)
    if weight is not None:
        fp8 = ("F8_E4M3",) if spec.matrix and not spec.stacked else ()
        _check(weight, spec.shape, (*_PLAIN, *fp8))
        if weight.dtype in fp8:
            return _fp8(spec, weight, parts, quantization.fp8_block)
        format_ = _PLAIN[weight.dtype]
        return BoundTensor(spec=spec, format=format_, data=weight, transposed=spec.transposed)
    if spec.matrix and spec.stacked:
        blocks = parts.find(f"{spec.name}_blocks")
        if blocks is not None:
            return _mxfp4(spec, blocks, parts, quantization)
    elif spec.matrix:
        module = spec.name.removesuffix(".weight")
        packed = parts.find(module + ".weight_packed")
        if packed is not None:
            return _int4(spec, packed, parts, quantization)
        packed = parts.find(module + ".qweight")
        if packed is not None:
            of_method = _gptq if quantization.method == "gptq" else _awq
            return of_method(spec, module, packed, parts, quantization)
    parts.missing.append(spec.name)
    return None


def _fp8(
    spec: TensorSpec, weight: TensorView, parts: StoredParts, block: tuple[int, int] | None
) -> BoundTensor | None:
    rows, cols = spec.shape
    blocks = {_grid(spec.shape, block): block} if block else {}
    whole = {(1,): (rows, cols), (): (rows, cols)}
    scale = parts.find(spec.name + "_scale_inv")
    if scale is not None:
        # The name is that of blocks; without blocks in the config it is one scale in all.
        blocks = blocks or whole
        if scale.shape not in blocks and not block:
            raise _undescribed(scale)
    else:
        blocks = {(rows, 1): (1, cols), **whole, **blocks}
        scale = parts.find(spec.name + "_scale")
    if scale is None:
        parts.missing.append(spec.name + ("_scale_inv" if block else "_scale"))
        return None
    if scale.shape not in blocks:
        raise _misshapen(scale, *blocks)
    _check(scale, scale.shape, tuple(_PLAIN))
    return BoundTensor(spec=spec, format="fp8", data=weight, scale=scale, block=blocks[scale.shape])


def _int4(
    spec: TensorSpec, packed: TensorView, parts: StoredParts, quantization: Quantization
) -> BoundTensor | None:
    if quantization.method != "compressed-tensors" or not quantization.group_sizes:
        raise _undescribed(packed)
    rows, cols = spec.shape
    _check(packed, (rows, _packed(cols, packed)), ("I32",))
    scale = parts.find(packed.name.removesuffix("_packed") + "_scale")
    if scale is None:
        parts.missing.append(packed.name.removesuffix("_packed") + "_scale")
        return None
    grids = {_grid(spec.shape, (1, size)): (1, size) for size in quantization.group_sizes}
    if scale.shape not in grids:
        raise _misshapen(scale, *grids)
    _check(scale, scale.shape, tuple(_PLAIN))
    return BoundTensor(spec=spec, format="int4", data=packed, scale=scale, block=grids[scale.shape])


def _awq(
    spec: TensorSpec,
    module: str,
    packed: TensorView,
    parts: StoredParts,
    quantization: Quantization,
) -> BoundTensor | None:
    if quantization.method != "awq":
        raise _undescribed(packed)
    outputs, inputs = spec.shape
    _check(packed, (inputs, _packed(outputs, packed)), ("I32",))
    return _with_zeros(spec, "awq", module, packed, parts, quantization)


def _gptq(
    spec: TensorSpec,
    module: str,
    packed: TensorView,
    parts: StoredParts,
    quantization: Quantization,
) -> BoundTensor | None:
    outputs, inputs = spec.shape
    _check(packed, (_packed(inputs, packed), outputs), ("I32",))
    bound = _with_zeros(spec, "gptq", module, packed, parts, quantization)
    # Looked at whatever desc_act says, a page a layer: files contradict it, and an order that is
    # not followed gives wrong numbers without a sign.
    name = module + ".g_idx"
    if parts.look(name) is None and not quantization.act_order:
        return bound  # of early tools, which had no other order
    index = parts.need(name, (inputs,), ("I32",))
    if bound is None or index is None:
        return None
    groups, group = index.array, bound.block[0]
    if groups.min() < 0 or groups.max() > (inputs - 1) // group:
        raise CheckpointDamaged(
            f"{index.file} is damaged", f"{index.name!a} names a group that does not exist"
        )
    if np.array_equal(groups, np.arange(inputs) // group):
        return bound
    return replace(bound, group_index=index)


def _with_zeros(
    spec: TensorSpec,
    format_: Format,
    module: str,
    packed: TensorView,
    parts: StoredParts,
    quantization: Quantization,
) -> BoundTensor | None:
    """4 bits stored [inputs, outputs], with zero points and scales for each group of inputs."""
    outputs, inputs = spec.shape
    group = quantization.group_sizes[0] or inputs
    grid_rows = -(-inputs // group)
    zeros = parts.need(module + ".qzeros", (grid_rows, _packed(outputs, packed)), ("I32",))
    scale = parts.need(module + ".scales", (grid_rows, outputs), tuple(_PLAIN))
    if zeros is None or scale is None:
        return None
    return BoundTensor(
        spec=spec,
        format=format_,
        data=packed,
        scale=scale,
        zeros=zeros,
        block=(group, 1),
        transposed=True,
    )


def _mxfp4(
    spec: TensorSpec, blocks: TensorView, parts: StoredParts, quantization: Quantization
) -> BoundTensor | None:
    """The table has the plain layout, [experts, inputs, outputs] when transposed."""
    if quantization.method != "mxfp4":
        raise _undescribed(blocks)
    experts, rows, cols = spec.shape
    if spec.transposed:
        rows, cols = cols, rows
    if cols % _MXFP4_COLS:
        raise _indivisible(blocks, cols, _MXFP4_COLS)
    grid = (experts, rows, cols // _MXFP4_COLS)
    _check(blocks, (*grid, _MXFP4_COLS // 2), ("U8",))
    scale = parts.need(f"{spec.name}_scales", grid, ("U8", "F8_E8M0"))
    if scale is None:
        return None
    return BoundTensor(spec=spec, format="mxfp4", data=blocks, scale=scale, block=(1, _MXFP4_COLS))


def _grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Blocks of a matrix, the last of a row or column being ragged."""
    return tuple(-(-size // step) for size, step in zip(shape, block))


def _packed(size: int, tensor: TensorView) -> int:
    """Words of 8 nibbles that hold ``size`` elements."""
    if size % _PACK:
        raise _indivisible(tensor, size, _PACK)
    return size // _PACK


def _check(tensor: TensorView, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    if tensor.shape != shape:
        raise _misshapen(tensor, shape)
    if tensor.dtype not in dtypes:
        raise ArchitectureUnsupported(
            f"{tensor.file} stores {tensor.name!a} as {tensor.dtype}",
            f"moechat computes with {', '.join(dtypes)} there",
        )


def _misshapen(tensor: TensorView, *expected: tuple[int, ...]) -> CheckpointDamaged:
    shapes = " or ".join(str(list(shape)) for shape in expected)
    return CheckpointDamaged(
        f"{tensor.file} does not fit config.json",
        f"{tensor.name!a} has shape {list(tensor.shape)} and should have {shapes}",
    )


def _undescribed(tensor: TensorView) -> ArchitectureUnsupported:
    return ArchitectureUnsupported(
        f"{tensor.file} stores quantised values in {tensor.name!a}",
        "the quantization_config of config.json does not say how",
    )


def _indivisible(tensor: TensorView, size: int, unit: int) -> ArchitectureUnsupported:
    return ArchitectureUnsupported(
        f"{tensor.file} stores {tensor.name!a} packed",
        f"moechat unpacks sizes that are multiples of {unit}, and this one is {size}",
    )
