"""Inputs to e4m3 codes in one pass: the same as quantised.quantise. Imports triton."""

from __future__ import annotations

from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from moechat.gpu_weights.quantised import GROUP, Quantised

_GROUPS = 8  # a program


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _quantise(  # type: ignore[no-untyped-def]
    x, codes, scale, num_inputs, num_groups, stride_x, GROUPS: tl.constexpr, GROUP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    k = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = tl.load(x + row * stride_x + k, mask=k < num_inputs, other=0.0).to(tl.float32)
    # A maximum may pass NaN over, whose code is NaN whatever the scale is.
    factor = tl.div_rn(tl.maximum(tl.max(tl.abs(values), 1), 1e-30), 448.0)
    scaled = tl.div_rn(values, tl.broadcast_to(factor[:, None], (GROUPS, GROUP)))
    tl.store(codes + row * num_inputs + k, scaled.to(tl.float8e4nv), mask=k < num_inputs)
    tl.store(scale + row * num_groups + group, factor, mask=group < num_groups)


def quantise(x_RK: torch.Tensor) -> Quantised:
    """As quantised.quantise, of rows that are dense."""
    x_RK = x_RK.to(torch.bfloat16)
    rows, num_inputs = x_RK.shape
    groups = -(-num_inputs // GROUP)
    codes = torch.empty((rows, num_inputs), dtype=torch.float8_e4m3fn, device=x_RK.device)
    scale = torch.empty((rows, groups), dtype=torch.float32, device=x_RK.device)
    if rows:
        device: Any = torch.cuda.device_of  # it has no types
        with device(x_RK):
            _quantise[(rows, -(-groups // _GROUPS))](
                x_RK, codes, scale, num_inputs, groups, x_RK.stride(0),
                GROUPS=_GROUPS, GROUP=GROUP, num_warps=4,
            )  # fmt: skip
    return Quantised(codes, scale)
