"""Held experts of a few rows on a GPU: HotExperts.add in two kernels.

A block takes some outputs of one (row, slot) pair, or of one row for all its slots in order, so
that no bit depends on other rows. Shapes: R rows, k experts a token, D hidden, I width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch  # type: ignore[import-not-found, unused-ignore]
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from moechat.gpu_weights.weight import Fp8Matrix, Weight
from moechat.models.spec import ModelSpec

if TYPE_CHECKING:
    from moechat.decode.gpu.hot_experts import HotLayer

_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "swiglu_clamped": 2}
_TILE_OUTPUTS, _TILE_INPUTS = 16, 128


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _dot(  # type: ignore[no-untyped-def]
    total, x, weight, scale, place, n, k0, outputs, inputs, block_rows, block_cols,
    FP8: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """total [BN] + x [BK] times the tile [BN, BK] of an expert's matrix, by its scale."""
    k = k0 + tl.arange(0, BK)
    real = (n[:, None] < outputs) & (k[None, :] < inputs)
    begin = place.to(tl.int64) * outputs * inputs
    tile = tl.load(weight + begin + n[:, None] * inputs + k[None, :], mask=real, other=0)
    if not FP8:
        return total + tl.sum(tile.to(tl.float32) * x[None, :], 1)
    code = tile.to(tl.int32)
    half = ((code & 0x80) << 8) | ((code & 0x7F) << 7)  # of a 256th of the value
    value = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    value = tl.where((code & 0x7F) == 0x7F, float("nan"), value)
    grid_cols = tl.cdiv(inputs, block_cols)
    grid = place.to(tl.int64) * tl.cdiv(outputs, block_rows) * grid_cols
    own = tl.load(
        scale + grid + n // block_rows * grid_cols + k0 // block_cols, mask=n < outputs, other=0.0
    )
    return total + tl.sum(value * x[None, :], 1) * own


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _gate_up(  # type: ignore[no-untyped-def]
    x, ids, place_of, gate, gate_scale, up, up_scale, out,
    x_stride, hidden, width, block_rows, block_cols, limit, alpha,
    CHOSEN: tl.constexpr, ACTIVATION: tl.constexpr, FP8: tl.constexpr, ROUND: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    place = tl.load(place_of + tl.load(ids + pair))
    if place >= 0:
        gates = tl.zeros((BN,), tl.float32)
        ups = tl.zeros((BN,), tl.float32)
        for k0 in range(0, hidden, BK):
            k = k0 + tl.arange(0, BK)
            part = tl.load(x + pair // CHOSEN * x_stride + k, mask=k < hidden, other=0.0)
            if ROUND:
                part = part.to(tl.bfloat16).to(tl.float32)
            gates = _dot(
                gates, part, gate, gate_scale, place, n, k0, width, hidden, block_rows,
                block_cols, FP8, BK,
            )  # fmt: skip
            ups = _dot(
                ups, part, up, up_scale, place, n, k0, width, hidden, block_rows, block_cols,
                FP8, BK,
            )  # fmt: skip
        if ACTIVATION == 0:
            inner = gates / (1.0 + tl.exp(-gates)) * ups
        elif ACTIVATION == 1:
            twice = 1.5957691216057308 * (gates + 0.044715 * gates * gates * gates)
            inner = gates / (1.0 + tl.exp(-twice)) * ups
        else:
            gates = tl.minimum(gates, limit)
            ups = tl.minimum(tl.maximum(ups, -limit), limit)
            inner = (ups + 1.0) * gates / (1.0 + tl.exp(-alpha * gates))
        tl.store(out + pair * width + n, inner, mask=n < width)


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _down(  # type: ignore[no-untyped-def]
    inner, ids, weights, place_of, down, scale, base, out,
    base_stride, hidden, width, block_rows, block_cols,
    CHOSEN: tl.constexpr, FP8: tl.constexpr, ROUND: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BN,), tl.float32)
    for slot in range(CHOSEN):
        pair = row * CHOSEN + slot
        place = tl.load(place_of + tl.load(ids + pair))
        if place >= 0:
            own = tl.zeros((BN,), tl.float32)
            for k0 in range(0, width, BK):
                k = k0 + tl.arange(0, BK)
                part = tl.load(inner + pair * width + k, mask=k < width, other=0.0)
                if ROUND:
                    part = part.to(tl.bfloat16).to(tl.float32)
                own = _dot(
                    own, part, down, scale, place, n, k0, hidden, width, block_rows, block_cols,
                    FP8, BK,
                )  # fmt: skip
            total += tl.load(weights + pair) * own
    real = n < hidden
    before = tl.load(base + row * base_stride + n, mask=real, other=0.0)
    tl.store(out + row * hidden + n, before + total, mask=real)


def _parts(weight: Weight) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int]]:
    if isinstance(weight, Fp8Matrix):
        return weight.codes, weight.scale, weight.block
    return weight, weight, (1, 1)


def add(
    spec: ModelSpec,
    held: HotLayer,
    x_RD: torch.Tensor,
    ids_Rk: torch.Tensor,
    weights_Rk: torch.Tensor,
    base_RD: torch.Tensor,
    round_inputs: bool,
) -> torch.Tensor:
    """As HotExperts.add; ids and weights are dense. ``round_inputs``: of products, to bfloat16."""
    rows, chosen = ids_Rk.shape
    gate, gate_scale, block = _parts(held.gate)
    up, up_scale, _ = _parts(held.up)
    down, down_scale, down_block = _parts(held.down)
    width, hidden = gate.shape[1:]
    same = {
        "CHOSEN": chosen, "FP8": isinstance(held.gate, Fp8Matrix),
        "ROUND": round_inputs, "BN": _TILE_OUTPUTS, "BK": _TILE_INPUTS,
    }  # fmt: skip
    inner = x_RD.new_empty((rows * chosen, width))
    _gate_up[(rows * chosen, triton.cdiv(width, _TILE_OUTPUTS))](
        x_RD, ids_Rk, held.place_E, gate, gate_scale, up, up_scale, inner,
        x_RD.stride(0), hidden, width, *block, spec.activation_limit, spec.activation_alpha,
        ACTIVATION=_ACTIVATIONS[spec.activation], **same,
    )  # fmt: skip
    out_RD = torch.empty_like(base_RD, memory_format=torch.contiguous_format)
    _down[(rows, triton.cdiv(hidden, _TILE_OUTPUTS))](
        inner, ids_Rk, weights_Rk, held.place_E, down, down_scale, base_RD, out_RD,
        base_RD.stride(0), hidden, width, *down_block, **same,
    )  # fmt: skip
    return out_RD
