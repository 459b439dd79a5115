"""The same as ``halve`` and ``quantise`` of inputs.py by a kernel each. Imports triton."""

from __future__ import annotations

from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from moechat.gpu_weights.inputs import GROUP, Halves, Quantised

_GROUPS = 8  # a program
_BLOCK = 2048
_device_of: Any = torch.cuda.device_of  # it has no types


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _halve(x, values, scale, num_inputs, stride_x, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, num_inputs, BLOCK):
        there = tl.load(x + row * stride_x + first + k, mask=k < num_inputs - first, other=0.0)
        largest = tl.maximum(largest, tl.abs(there.to(tl.bfloat16).to(tl.float32)))
    exponent = tl.max(largest, 0).to(tl.int32, bitcast=True) >> 23
    power = tl.minimum(tl.maximum(268 - exponent, 1), 253)
    factor = (power << 23).to(tl.float32, bitcast=True)
    for first in range(0, num_inputs, BLOCK):
        inside = k < num_inputs - first
        there = tl.load(x + row * stride_x + first + k, mask=inside, other=0.0)
        there = there.to(tl.bfloat16).to(tl.float32) * factor
        tl.store(values + row * num_inputs + first + k, there.to(tl.float16), mask=inside)
    tl.store(scale + row, ((254 - power) << 23).to(tl.float32, bitcast=True))


def halve(x_RK: torch.Tensor) -> Halves:
    """As inputs.halve, of rows that are dense."""
    rows, num_inputs = x_RK.shape
    values = torch.empty((rows, num_inputs), dtype=torch.float16, device=x_RK.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x_RK.device)
    if rows:
        with _device_of(x_RK):
            _halve[(rows,)](
                x_RK, values, scale, num_inputs, x_RK.stride(0), BLOCK=_BLOCK, num_warps=8
            )
    return Halves(values, scale)


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _quantise(  # type: ignore[no-untyped-def]
    x, codes, scale, num_inputs, num_groups, stride_x, GROUPS: tl.constexpr, GROUP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    k = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = tl.load(x + row * stride_x + k, mask=k < num_inputs, other=0.0)
    values = values.to(tl.bfloat16).to(tl.float32)
    # A maximum may pass NaN over, whose code is NaN whatever the scale is.
    factor = tl.div_rn(tl.maximum(tl.max(tl.abs(values), 1), 1e-30), 448.0)
    scaled = tl.div_rn(values, tl.broadcast_to(factor[:, None], (GROUPS, GROUP)))
    tl.store(codes + row * num_inputs + k, scaled.to(tl.float8e4nv), mask=k < num_inputs)
    tl.store(scale + row * num_groups + group, factor, mask=group < num_groups)


def quantise(x_RK: torch.Tensor) -> Quantised:
    """As inputs.quantise, of rows that are dense."""
    rows, num_inputs = x_RK.shape
    groups = -(-num_inputs // GROUP)
    codes = torch.empty((rows, num_inputs), dtype=torch.float8_e4m3fn, device=x_RK.device)
    scale = torch.empty((rows, groups), dtype=torch.float32, device=x_RK.device)
    if rows:
        with _device_of(x_RK):
            _quantise[(rows, -(-groups // _GROUPS))](
                x_RK, codes, scale, num_inputs, groups, x_RK.stride(0),
                GROUPS=_GROUPS, GROUP=GROUP, num_warps=4,
            )  # fmt: skip
    return Quantised(codes, scale)
