"""Stored bytes on a device become matrices: one decoder a format, in torch operations.

A weight is float32(code) * float32(scale), the value that cpp/kernels/matmul/weight_at.h defines;
for a BF16 result that product is rounded once more, to nearest even. Values that BF16 holds (BF16,
MXFP4 within its range) are therefore exact in both modes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]

from moechat.gpu_weights.stored import Layout
from moechat.gpu_weights.weight import Fp8Matrix, Weight, scale_blocks

_PLAIN = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_SCALES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# e2m1: sign, two bits of exponent, one of mantissa (OCP microscaling formats 1.0, section 5.3.3)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@functools.cache
def _triton() -> Any:
    """The module with the kernel, or None where triton is missing."""
    try:
        from moechat.gpu_weights import triton_decode
    except ImportError:
        return None
    return triton_decode


def is_view(layout: Layout, dtype: torch.dtype) -> bool:
    """Whether ``decode`` to dtype gives a view of the bytes, if all outputs are wanted."""
    return bool(_PLAIN.get(layout.format) == dtype)


def stays_stored(layout: Layout, dtype: torch.dtype) -> bool:
    """Whether ``weight_of`` leaves the bytes as they are."""
    as_codes = layout.format == "fp8" and dtype == torch.bfloat16 and not layout.transposed
    return as_codes or is_view(layout, dtype)


def weight_of(
    layout: Layout,
    data: torch.Tensor,
    scale: torch.Tensor | None,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> Weight:
    """As ``decode``, but FP8 stays codes where inputs are BF16: products scale their sums."""
    if layout.format == "fp8" and stays_stored(layout, dtype):
        assert scale is not None
        codes = data.view(len(data), layout.rows, layout.cols)
        return Fp8Matrix(codes, scale_grid(layout, scale), layout.block)
    return decode(layout, data, scale, dtype, out)


def decode(
    layout: Layout,
    data: torch.Tensor,
    scale: torch.Tensor | None,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[E, outputs, inputs] in dtype (bfloat16 or float32) of uint8 ``data`` [E, bytes].

    ``scale``: uint8 [E, bytes of the grid]. Bytes must be aligned to their elements. ``out``: flat
    memory of dtype, with at least as many elements, for the result unless it is a view of ``data``.
    Transposed matrices come with the strides of their storage.
    """
    experts, rows, cols = len(data), layout.rows, layout.cols
    if is_view(layout, dtype):
        stored = data.view(dtype).view(experts, rows, cols)
    else:
        if out is None:
            out = torch.empty(experts * rows * cols, dtype=dtype, device=data.device)
        stored = out[: experts * rows * cols].view(experts, rows, cols)
        fast = _triton() if layout.format == "fp8" and data.is_cuda else None
        if fast is not None and fast.fits(layout.block, rows, cols):
            assert scale is not None
            codes = data.view(experts, rows, cols)
            fast.decode_fp8(codes, scale_grid(layout, scale), layout.block, stored)
        elif layout.format in _PLAIN:
            stored.copy_(data.view(_PLAIN[layout.format]).view(experts, rows, cols))
        else:
            _codes(layout.format, data.view(experts, rows, -1), stored)
            assert scale is not None
            scale_blocks(stored, scale_grid(layout, scale), layout.block)
    return stored.transpose(1, 2) if layout.transposed else stored


def _codes(format_: str, data: torch.Tensor, out: torch.Tensor) -> None:
    """Codes without their scale: exact in BF16. ``data`` uint8 [E, rows, bytes]."""
    if format_ == "fp8":
        out.copy_(data.view(torch.float8_e4m3fn))
        return
    table = torch.tensor([*_E2M1, *(-v for v in _E2M1)], dtype=out.dtype, device=data.device)
    for octets, values in zip(data, out):  # an expert at a time: what is between takes memory
        for first, nibbles in enumerate((octets & 15, octets >> 4)):
            if format_ == "int4":
                values[..., first::2] = nibbles.view(torch.int8) - 8
            else:
                values[..., first::2] = table[nibbles.int()]


def scale_grid(layout: Layout, scale: torch.Tensor) -> torch.Tensor:
    """Scales as float32 [E, grid rows, grid columns]."""
    if layout.scale_dtype in _SCALES:
        values = scale.view(_SCALES[layout.scale_dtype]).float()
    else:
        # E8M0: 2^(code - 127); 0 is float32's largest power of two below its normal ones.
        code = scale.int()
        bits = torch.where(code == 0, 0x00400000, code << 23)
        values = torch.where(code == 255, 0x7FC00000, bits).int().view(torch.float32)
    return values.view(len(scale), *layout.grid)
