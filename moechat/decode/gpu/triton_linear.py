"""Products of at most 16 rows: each weight is read once, as stored, and decoded in registers.

A program has a tile of outputs and a part of the inputs. Where there are several parts, each leaves
its sums in memory, and the program that is the last to be done adds them up in order. Tiles always
have 16 rows, and which parts there are depends on the weight alone: so the bits of a row depend on
nothing else.

Shapes: R rows, K inputs, N outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch  # type: ignore[import-not-found, unused-ignore]
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from moechat.decode.gpu.weight_views import Norm, shape_of
from moechat.gpu_weights.weight import Weight
from moechat.models.spec import ModelSpec

MAX_ROWS = 16
_GATES = {"silu": 1, "gelu_tanh": 2, "swiglu_clamped": 3}
_WANTED_WARPS = 1056  # eight for each multiprocessor of the largest cards
_MOST_PARTS = 16
_LEAST_PART = 512  # inputs


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def split_dot(x, w):  # type: ignore[no-untyped-def]
    """x w in float32 for float32 x and bfloat16 w: x as three numbers of 8 bits."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(high, w) + (tl.dot(middle, w) + tl.dot(low, w))


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _activate(gate, up, limit, alpha, GATE: tl.constexpr):  # type: ignore[no-untyped-def]
    if GATE == 1:
        return gate * tl.sigmoid(gate) * up
    if GATE == 2:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * tl.sigmoid(2.0 * inner) * up  # 0.5 (1 + tanh(u)) is sigmoid(2 u)
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    return (up + 1.0) * gate * tl.sigmoid(alpha * gate)


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _powers_of_two(most):  # type: ignore[no-untyped-def]
    """(2^n, 2^-n) that bring numbers up to ``most`` below 2^15; n within 100."""
    exponent = ((most.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
    n = tl.minimum(tl.maximum(14 - exponent, -100), 100)
    grow = ((127 + n) << 23).to(tl.float32, bitcast=True)
    shrink = ((127 - n) << 23).to(tl.float32, bitcast=True)
    return grow, shrink


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _largest(  # type: ignore[no-untyped-def]
    x, norm, begin, rows, inputs, x_stride, limit, alpha,
    NORM: tl.constexpr, GATE: tl.constexpr, STEPS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The largest magnitude of each row's inputs [begin, begin + STEPS * BK)."""
    row = tl.arange(0, 16)[:, None]
    most = tl.zeros((16, BK), tl.float32)
    for step in tl.static_range(STEPS):  # all loads are under way at once
        k = begin + step * BK + tl.arange(0, BK)
        here = (row < rows) & (k < inputs)[None, :]
        value = tl.load(x + row * x_stride + k[None, :], mask=here, other=0.0)
        if GATE > 0:
            up = tl.load(x + row * x_stride + (inputs + k)[None, :], mask=here, other=0.0)
            value = _activate(value, up, limit, alpha, GATE)
        if NORM:
            value *= tl.load(norm + k, mask=k < inputs, other=0.0)[None, :]
        most = tl.maximum(most, tl.abs(value))
    return tl.max(most, 1)


@triton.jit(do_not_specialize=["rows", "parts"])  # type: ignore[misc, untyped-decorator, unused-ignore]
def _linear(  # type: ignore[no-untyped-def]
    x, weight, scale, norm, bias, add, out, partial, squares, counters,
    rows, outputs, inputs, parts, part_inputs, x_stride, weight_stride, add_stride, out_stride,
    first_row, block_rows, block_cols, grid_cols, eps, limit, alpha,
    FP8: tl.constexpr, HALF: tl.constexpr, EXACT: tl.constexpr, NORM: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr, MOST_PARTS: tl.constexpr,
    WHOLE: tl.constexpr, STEPS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    tile, part = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, 16)[:, None]
    n = tile * BN + tl.arange(0, BN)
    inside = n < outputs
    safe_n = tl.minimum(n, outputs - 1)
    begin = part * part_inputs
    weight_row = weight + safe_n.to(tl.int64)[:, None] * weight_stride
    scale_row = scale + ((first_row + safe_n) // block_rows) * grid_cols
    total = tl.zeros((16, BN), tl.float32)
    square = tl.zeros((16, BK), tl.float32)
    if HALF:
        most = _largest(x, norm, begin, rows, inputs, x_stride, limit, alpha, NORM, GATE, STEPS, BK)
        grow, shrink = _powers_of_two(most)
    for step in range(0, part_inputs, BK):
        start = begin + step
        k = start + tl.arange(0, BK)
        if WHOLE:
            w = tl.load(weight_row + k[None, :])
            here = row < rows
        else:
            w = tl.load(weight_row + k[None, :], mask=(k < inputs)[None, :], other=0)
            here = (row < rows) & (k < inputs)[None, :]
        value = tl.load(x + row * x_stride + k[None, :], mask=here, other=0.0)
        if GATE > 0:
            up = tl.load(x + row * x_stride + (inputs + k)[None, :], mask=here, other=0.0)
            value = _activate(value, up, limit, alpha, GATE)
        if NORM:
            square += value * value
            value *= tl.load(norm + k, mask=k < inputs, other=0.0)[None, :]
        if HALF:
            w = w.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        elif FP8:
            # By way of float16 and float32: for the straight way there are no packed instructions.
            w = w.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32).to(tl.bfloat16)
        if w.dtype == tl.float32:
            product = tl.dot(value, tl.trans(w), input_precision="ieee")
        elif HALF:
            product = tl.dot((value * grow[:, None]).to(tl.float16), tl.trans(w))
        elif EXACT:
            product = split_dot(value, tl.trans(w))
        else:
            product = tl.dot(value.to(tl.bfloat16), tl.trans(w))
        if FP8:
            product *= tl.load(scale_row + tl.minimum(start, inputs - 1) // block_cols)[None, :]
        total += product
    if HALF:
        total *= shrink[:, None]
    own = (row < rows) & inside[None, :]
    sum_of_squares = tl.sum(square, 1)
    each = tl.arange(0, 16)
    last = True
    if MOST_PARTS > 1:
        place = row * outputs + n[None, :]
        tl.store(partial + part * rows * outputs + place, total, mask=own)
        if NORM:
            tl.store(squares + (tile * parts + part) * 16 + each, sum_of_squares)
        tl.debug_barrier()
        last = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == parts - 1
        if last:
            total = tl.zeros((16, BN), tl.float32)
            sum_of_squares = tl.zeros((16,), tl.float32)
            for other in tl.static_range(MOST_PARTS):  # all loads are under way at once
                total += tl.load(
                    partial + other * rows * outputs + place,
                    mask=own & (other < parts), other=0.0, cache_modifier=".cg",
                )  # fmt: skip
                if NORM:
                    sum_of_squares += tl.load(
                        squares + (tile * parts + other) * 16 + each,
                        mask=each < tl.where(other < parts, 16, 0),
                        other=0.0,
                        cache_modifier=".cg",
                    )
            tl.store(counters + tile, 0)
    if last:
        if NORM:
            total *= tl.rsqrt(sum_of_squares / inputs + eps)[:, None]
        if BIAS:
            total += tl.load(bias + n, mask=inside, other=0.0)[None, :]
        if ADD:
            total += tl.load(add + row * add_stride + n[None, :], mask=own, other=0.0)
        tl.store(out + row * out_stride + n[None, :], total, mask=own)


class Tiling(NamedTuple):
    """How a product is cut up: by the weight alone. ``half``: inputs in float16, scaled."""

    tile_outputs: int
    tile_inputs: int
    parts: int
    part_inputs: int
    stages: int
    warps: int = 4
    half: bool = False


def _tiling(outputs: int, inputs: int, element_bytes: int, block_cols: int, exact: bool) -> Tiling:
    """By the weight alone, so that the same bits come for any number of rows."""
    tile_inputs = 128 if element_bytes < 4 else 32
    while tile_inputs > block_cols or tile_inputs > max(16, inputs):
        tile_inputs //= 2
    tile_outputs, warps, stages = (16 if element_bytes == 4 else 32), 4, 4
    if outputs >= 1024 and not exact and element_bytes < 4:
        tile_outputs = 128 if element_bytes == 1 else 64
    if element_bytes == 1 and not exact and outputs >= 16384:
        tile_outputs, warps, stages = 256, 8, 3
    if element_bytes == 4:
        stages = 3
    tiles = -(-outputs // tile_outputs)
    parts = max(1, min(_WANTED_WARPS // warps // tiles, inputs // _LEAST_PART, _MOST_PARTS))
    part_inputs = -(-inputs // parts // tile_inputs) * tile_inputs
    return Tiling(
        tile_outputs, tile_inputs, -(-inputs // part_inputs), part_inputs,
        stages, warps, half=element_bytes == 1 and not exact,
    )  # fmt: skip


def fits(weight: Weight) -> bool:
    """Whether the kernel can multiply by it: blocks of scales are not cut by its tiles."""
    if isinstance(weight, torch.Tensor):
        return weight.dtype in (torch.bfloat16, torch.float32) and weight.stride(1) == 1
    cols = weight.block[1]
    return weight.codes.stride(1) == 1 and (cols >= weight.codes.shape[1] or _power_of_two(cols))


def _power_of_two(number: int) -> bool:
    return number >= 16 and number & (number - 1) == 0


def linear(
    x_RK: torch.Tensor,
    weight: Weight,
    counters: torch.Tensor,
    out_RN: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    add: torch.Tensor | None = None,
    gated: ModelSpec | None = None,
    exact: bool = False,
    tiling: Tiling | None = None,
) -> None:
    """ops.linear into ``out_RN``. Rows of all have unit stride within."""
    outputs, inputs = shape_of(weight)
    rows = len(x_RK)
    if isinstance(weight, torch.Tensor):
        stored, scale, block, first_row, grid_cols = weight, weight, (1, inputs), 0, 0
    else:
        stored, scale, block, first_row = weight.codes, weight.scale, weight.block, weight.first_row
        grid_cols = scale.stride(0)
    tiling = tiling or _tiling(outputs, inputs, stored.element_size(), block[1], exact)
    partial = squares = out_RN
    if tiling.parts > 1:
        partial = torch.empty((tiling.parts, rows, outputs), device=x_RK.device)
        tiles = -(-outputs // tiling.tile_outputs)
        squares = torch.empty(tiles * tiling.parts * MAX_ROWS, device=x_RK.device)
    grid = (-(-outputs // tiling.tile_outputs), tiling.parts)
    _linear[grid](
        x_RK, stored, scale,
        norm.weight if norm else x_RK, bias if bias is not None else x_RK,
        add if add is not None else out_RN, out_RN, partial, squares, counters,
        rows, outputs, inputs, tiling.parts, tiling.part_inputs, x_RK.stride(0), stored.stride(0),
        add.stride(0) if add is not None else 0, out_RN.stride(0),
        first_row, block[0], block[1], grid_cols, norm.eps if norm else 0.0,
        gated.activation_limit if gated else 0.0, gated.activation_alpha if gated else 0.0,
        FP8=stored.dtype == torch.uint8, HALF=tiling.half, EXACT=exact, NORM=norm is not None,
        BIAS=bias is not None, ADD=add is not None,
        GATE=_GATES[gated.activation] if gated else 0,
        MOST_PARTS=int(triton.next_power_of_2(tiling.parts)),
        WHOLE=inputs % tiling.tile_inputs == 0 and tiling.part_inputs * tiling.parts == inputs,
        BN=tiling.tile_outputs, BK=tiling.tile_inputs,
        STEPS=tiling.part_inputs // tiling.tile_inputs if tiling.half else 1,
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
