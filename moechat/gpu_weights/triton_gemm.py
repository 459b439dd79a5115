"""x W^T on matrix units for rows of many matrices at once: BF16 inputs, FP8 as stored or BF16.

FP8 codes become float16 in registers, exactly, as their inputs did before (inputs.py). The sum of
each block of inputs is scaled in float32 and added: weights are exact, as in the native kernels.
Inputs that are codes, too, are multiplied as codes, and sums scaled by both. A row's bits depend on
its inputs and its matrix alone. Imports triton, which comes with torch for CUDA.

Shapes: R rows, E matrices, N outputs, K inputs; a tile is some rows of one matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from moechat.gpu_weights.inputs import GROUP, Halves, Quantised
from moechat.gpu_weights.triton_inputs import halve, quantise
from moechat.gpu_weights.weight import Fp8Matrix, Weight

ACTIVATIONS = {"": 0, "silu": 1, "gelu_tanh": 2, "swiglu_clamped": 3}


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _activated(gate, up, KIND: tl.constexpr, alpha, limit):  # type: ignore[no-untyped-def]
    """act(gate) * up; models/spec.py has the formulas."""
    if KIND == 1:
        return gate * tl.sigmoid(gate) * up
    if KIND == 2:  # 0.5 x (1 + tanh u) = x sigmoid(2 u)
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        return gate * tl.sigmoid(inner) * up
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    return (up + 1.0) * gate * tl.sigmoid(alpha * gate)


# Neither alignment nor value of these is worth a kernel of its own: each takes a second to compile.
_ANY = (
    "x_scale", "tokens", "scale", "bias", "tile_list", "num_tiles", "x_groups", "grid_rows",
    "grid_cols", "first_row", "block_rows", "block_cols",
)  # fmt: skip


@triton.jit(do_not_specialize=_ANY)  # type: ignore[misc, untyped-decorator, unused-ignore]
def _gemm(  # type: ignore[no-untyped-def]
    x,
    x_scale,
    tokens,
    weight,
    scale,
    bias,
    gate,
    out,
    tile_list,
    num_tiles,
    N,
    K,
    x_groups,
    stride_x,
    stride_matrix,
    stride_n,
    stride_k,
    grid_rows,
    grid_cols,
    first_row,
    block_rows,
    block_cols,
    alpha,
    limit,
    FP8: tl.constexpr,
    HALVES: tl.constexpr,
    X_GROUP: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    GATHER: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WHOLE_K: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP_TILES: tl.constexpr,
):
    # Some tiles share their matrix and some outputs their rows: neighbours in time for the cache.
    tiles_n = tl.cdiv(N, TILE_N)
    program = tl.program_id(0)
    group = program // (GROUP_TILES * tiles_n)
    group_size = tl.minimum(num_tiles - group * GROUP_TILES, GROUP_TILES)
    inner = program % (GROUP_TILES * tiles_n)
    tile = group * GROUP_TILES + inner % group_size
    n_first = (inner // group_size) * TILE_N
    matrix = tl.load(tile_list + 3 * tile).to(tl.int64)
    begin = tl.load(tile_list + 3 * tile + 1)
    end = tl.load(tile_list + 3 * tile + 2)

    row = begin + tl.arange(0, TILE_ROWS)
    n = n_first + tl.arange(0, TILE_N)
    # Beyond the edge the last is read once more: no masks in the loop.
    source = tl.minimum(row, end - 1).to(tl.int64)
    if GATHER:
        source = tl.load(tokens + source)
    there = tl.minimum(n, N - 1)
    k = tl.arange(0, TILE_K)
    x_at = x + source[None, :] * stride_x + k[:, None]
    weight_at = weight + matrix * stride_matrix
    weight_at = weight_at + there.to(tl.int64)[:, None] * stride_n + k[None, :] * stride_k
    if FP8:
        scale_at = scale + matrix * grid_rows * grid_cols
        if ONE_SCALE:
            scale_at += (first_row + n_first) // block_rows * grid_cols
        else:
            scale_at += (first_row + there) // block_rows * grid_cols
    x_scale_at = x_scale + source * x_groups

    # Outputs by rows: codes are then the operand that may come from registers.
    total = tl.zeros((TILE_N, TILE_ROWS), dtype=tl.float32)
    for k_first in range(0, K, TILE_K):
        if FP8:
            factor = tl.load(scale_at + k_first // block_cols)
            if not ONE_SCALE:
                factor = factor[:, None]
            if X_GROUP:
                factor = factor * tl.load(x_scale_at + k_first // X_GROUP)[None, :]
        if WHOLE_K:
            codes = tl.load(weight_at)
            inputs = tl.load(x_at)
        else:
            inside = k < K - k_first
            codes = tl.load(weight_at, mask=inside[None, :], other=0.0)
            inputs = tl.load(x_at, mask=inside[:, None], other=0.0)
        if FP8:
            if X_GROUP:
                values = codes
            elif NATIVE_FP8:
                values = codes.to(tl.float16)
            else:  # exponent and mantissa where float16 has them: 2^-8 of the value
                bits = codes.to(tl.int16)
                size = tl.where((bits & 0x7F) == 0x7F, 0x7E00, (bits & 0x7F) << 7).to(tl.int16)
                values = (size | ((bits & 0x80) << 8)).to(tl.float16, bitcast=True)
            if X_GROUP:  # Hopper sums products of codes in some 14 bits: not more than 32 at a time
                total += tl.dot(values, inputs, max_num_imprecise_acc=32) * factor
            else:
                total += tl.dot(values, inputs) * factor
        else:
            total = tl.dot(codes, inputs, total)
        weight_at += TILE_K * stride_k
        x_at += TILE_K

    if HALVES:
        by_row = tl.load(x_scale + source)
        if not NATIVE_FP8:
            by_row *= 256.0
        total *= by_row[None, :]
    if BIAS:
        total += tl.load(bias + matrix * N + there)[:, None]
    place = row.to(tl.int64)[None, :] * N + n[:, None]
    inside = (row < end)[None, :] & (n < N)[:, None]
    if ACTIVATION:
        total = _activated(tl.load(gate + place, mask=inside), total, ACTIVATION, alpha, limit)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Tiling:
    """Rows, outputs and inputs of a program's tile; warps and stages of its pipeline."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


# By the shared memory that a block may have: data-centre cards (164 KB and more), others (99 KB).
_LARGE = {64: Tiling(64, 256, 64, 8, 4), 128: Tiling(128, 256, 64, 8, 4)}
# Two programs share a multiprocessor: one converts codes while the other multiplies.
_LARGE_FP8 = {64: Tiling(64, 128, 128, 4, 3), 128: Tiling(128, 64, 128, 4, 3)}
_SMALL = {64: Tiling(64, 128, 64, 4, 3), 128: Tiling(128, 128, 64, 8, 2)}
_GROUP_TILES = 8


def tiling(weight: Weight, mean_rows: float) -> Tiling | None:
    """For matrices with about ``mean_rows`` rows each; None: nothing here multiplies with them.

    A choice by the shape of the whole alone, never by what a group of experts happens to have.
    """
    large = _LARGE_FP8 if isinstance(weight, Fp8Matrix) else _LARGE
    chosen = (large if _is_large(weight.device) else _SMALL)[64 if mean_rows <= 64 else 128]
    inputs = chosen.inputs
    quantised = isinstance(weight, Fp8Matrix) and weight.quantised_inputs
    if quantised and not _native_fp8(weight.device):
        return None
    if isinstance(weight, Fp8Matrix) and weight.block[1] < weight.shape[-1]:
        while weight.block[1] % inputs:
            inputs //= 2
    if inputs < 16:
        return None
    return Tiling(chosen.rows, chosen.outputs, inputs, chosen.warps, chosen.stages)


def _native_fp8(device: torch.device) -> bool:
    """Whether e4m3 is a type of the machine: from Ada on (CUDA programming guide)."""
    return device.type != "cuda" or bool(torch.cuda.get_device_capability(device) >= (8, 9))


def _is_large(device: torch.device) -> bool:
    """Whether a block may have 160 KB of shared memory (CUDA programming guide, capabilities)."""
    if device.type != "cuda":
        return True
    major, minor = torch.cuda.get_device_capability(device)
    return major in (9, 10) or (major, minor) == (8, 0)


def tile_list(bounds: Sequence[int], rows: int, device: torch.device) -> torch.Tensor:
    """int32 [tiles, 3]: matrix, first row and end of each tile; matrix e has the rows [b_e, b_e+1).

    For ``bounds`` [E + 1].
    """
    tiles = [
        (matrix, begin, bounds[matrix + 1])
        for matrix in range(len(bounds) - 1)
        for begin in range(bounds[matrix], bounds[matrix + 1], rows)
    ]
    return torch.tensor(tiles, dtype=torch.int32).reshape(-1, 3).to(device, non_blocking=True)


@functools.lru_cache(maxsize=64)
def one_matrix(num_rows: int, rows: int, device: torch.device) -> torch.Tensor:
    """The ``tile_list`` of one matrix for all rows."""
    return tile_list((0, num_rows), rows, device)


@dataclass(frozen=True, slots=True)
class Gated:
    """An epilogue: act(gate) * product, of ``gate`` float32 [R, N]; ``kind`` of ACTIVATIONS."""

    kind: str
    gate: torch.Tensor
    alpha: float = 0.0
    limit: float = 0.0


def gemm(
    x: torch.Tensor | Halves | Quantised,
    weight: Weight,
    tiles: torch.Tensor,
    how: Tiling,
    out_RN: torch.Tensor,
    *,
    tokens_R: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    gated: Gated | None = None,
) -> torch.Tensor:
    """``out_RN`` (float32 or bfloat16, dense): row r is x[tokens_R[r]], or x[r], times its matrix.

    ``x``: bfloat16, rows dense, or what ``inputs_of`` makes of it. ``weight``: [E, N, K] or [N, K],
    bfloat16 of any strides or FP8. ``tiles``: of ``tile_list`` with ``how.rows``. ``bias``: float32
    [E, N], before ``gated``.
    """
    num_outputs, num_inputs = weight.shape[-2:]
    grid = (len(tiles) * -(-num_outputs // how.outputs),)
    if not grid[0]:
        return out_RN
    x_scale, halves, groups = None, isinstance(x, Halves), 0
    if not isinstance(x, torch.Tensor):
        groups = 0 if isinstance(x, Halves) else x.scale.shape[1]
        x_scale = x.scale
        x = x.values
    native = _native_fp8(x.device)
    if isinstance(weight, Fp8Matrix):
        values, scale, block = weight.codes, weight.scale, weight.block
        if native:
            values = values.view(torch.float8_e4m3fn)
        first_row, fp8 = weight.first_row, True
        one_scale = block[0] % how.outputs == 0 and first_row % how.outputs == 0
        one_scale = one_scale or first_row + num_outputs <= block[0]
    else:
        values, scale, block, first_row, fp8 = weight, weight, (1, 1), 0, False
        one_scale = True
    assert x.stride(-1) == 1 and out_RN.is_contiguous()
    assert not fp8 or scale.is_contiguous()
    device: Any = torch.cuda.device_of  # it has no types
    with device(x):
        _gemm[grid](
            x, x if x_scale is None else x_scale, tokens_R if tokens_R is not None else tiles,
            values, scale, bias if bias is not None else x, gated.gate if gated else x, out_RN,
            tiles, len(tiles), num_outputs, num_inputs, groups, x.stride(0),
            values.stride(0) if values.dim() > 2 else 0, values.stride(-2),
            values.stride(-1), scale.shape[-2], scale.shape[-1], first_row, *block,
            gated.alpha if gated else 0.0, gated.limit if gated else 0.0,
            FP8=fp8, HALVES=halves, X_GROUP=GROUP if groups else 0, NATIVE_FP8=native,
            ONE_SCALE=one_scale, GATHER=tokens_R is not None, BIAS=bias is not None,
            ACTIVATION=ACTIVATIONS[gated.kind if gated else ""],
            WHOLE_K=num_inputs % how.inputs == 0, TILE_ROWS=how.rows, TILE_N=how.outputs,
            TILE_K=how.inputs, GROUP_TILES=_GROUP_TILES, num_warps=how.warps,
            num_stages=how.stages,
        )  # fmt: skip
    return out_RN


def inputs_of(weight: Weight, x_RK: torch.Tensor) -> torch.Tensor | Halves | Quantised:
    """What ``weight`` is multiplied with: of FP8 not bfloat16 itself."""
    if not isinstance(weight, Fp8Matrix):
        return x_RK.to(torch.bfloat16)
    return quantise(x_RK) if weight.quantised_inputs else halve(x_RK)


def linear(
    x_RK: torch.Tensor,
    weight_NK: Weight,
    dtype: torch.dtype = torch.float32,
    bias_N: torch.Tensor | None = None,
    gated: Gated | None = None,
) -> torch.Tensor | None:
    """``gemm`` of one matrix and all rows: [R, N] in ``dtype``. None: ``tiling`` has none."""
    how = tiling(weight_NK, torch.inf)  # whatever the number of rows: a chunk's must not matter
    if how is None:
        return None
    out_RN = torch.empty((len(x_RK), len(weight_NK)), dtype=dtype, device=x_RK.device)
    tiles = one_matrix(len(x_RK), how.rows, x_RK.device)
    x = inputs_of(weight_NK, x_RK)
    return gemm(x, weight_NK, tiles, how, out_RN, bias=bias_N, gated=gated)
