"""Absorbed latent attention of at most 16 rows in four kernels: queries and new slots,
attention, its parts joined, values.

Slots are cut into parts by how many there are of a row, so that the bits of a row depend on its
own slots alone. Queries in latent space and the weights of values are rounded to bfloat16 for the
matrix units, as prefill's fused attention rounds them; sums are float32. With float32 slots nothing
is rounded.

Shapes: R rows, H heads, W elements of a slot: the latent, then the rotated key; S parts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch  # type: ignore[import-not-found, unused-ignore]
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from moechat.decode.gpu import triton_linear
from moechat.decode.gpu.weight_views import Slots
from moechat.gpu_weights.weight import Weight
from moechat.models.spec import LatentAttention, ModelSpec

_PARTS = 32


class Tiling(NamedTuple):
    """Heads and slots of a tile of attention."""

    heads: int = 16
    slots: int = 32
    warps: int = 4
    stages: int = 2


TILING = Tiling()
_LEAST_TILES = tl.constexpr(2)  # of a part: reading the queries has to pay
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _rotated(  # type: ignore[no-untyped-def]
    source, cos, sin, target, real, pairs, INTERLEAVED: tl.constexpr, BP: tl.constexpr
):
    """target[:2 * pairs] = source[:2 * pairs], rotated, of all rows [n, 1] that are real."""
    pair = tl.arange(0, BP)[None, :]
    real = real & (pair < pairs)
    if INTERLEAVED:
        one, two = 2 * pair, 2 * pair + 1
    else:
        one, two = pair, pair + pairs
    first = tl.load(source + one, mask=real, other=0.0)
    second = tl.load(source + two, mask=real, other=0.0)
    c = tl.load(cos + pair, mask=real, other=0.0)
    s = tl.load(sin + pair, mask=real, other=0.0)
    tl.store(target + one, (first * c - second * s).to(target.dtype.element_ty), mask=real)
    tl.store(target + two, (first * s + second * c).to(target.dtype.element_ty), mask=real)


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _absorb(  # type: ignore[no-untyped-def]
    query, query_stride, weight, scale, target, target_stride, head, column_tile,
    rows, nope, value_width, rank, weight_stride, first_row, block_rows, block_cols, grid_cols,
    FP8: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """A tile of columns of one head's queries in latent space."""
    row = tl.arange(0, 16)[:, None]
    c = column_tile * BC + tl.arange(0, BC)
    absorbed = tl.zeros((16, BC), tl.float32)
    for first in range(0, nope, BN):
        d = first + tl.arange(0, BN)
        weight_row = head * (nope + value_width) + d
        w = tl.load(
            weight + weight_row.to(tl.int64)[:, None] * weight_stride + c[None, :],
            mask=(d < nope)[:, None] & (c < rank)[None, :], other=0,
        )  # fmt: skip
        x = tl.load(
            query + row * query_stride + d[None, :],
            mask=(row < rows) & (d < nope)[None, :], other=0.0,
        )  # fmt: skip
        if FP8:
            place = (first_row + weight_row) // block_rows * grid_cols
            place += column_tile * BC // block_cols
            x *= tl.load(scale + place, mask=d < nope, other=0.0)[None, :]
            w = w.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32).to(tl.bfloat16)
        if w.dtype == tl.float32:
            absorbed += tl.dot(x, w, input_precision="ieee")
        else:
            absorbed += triton_linear.split_dot(x, w)
    there = target + row * target_stride + c[None, :]
    tl.store(there, absorbed.to(target.dtype.element_ty), mask=(row < rows) & (c < rank)[None, :])


@triton.jit(do_not_specialize=["rows"])  # type: ignore[misc, untyped-decorator, unused-ignore]
def _inputs(  # type: ignore[no-untyped-def]
    query, kv, weight, scale, kv_norm, cos, sin, slots, slab, own, latent_query, new_slots,
    rows, heads, nope, rope, value_width, rank, slots_of_slab,
    query_stride, kv_stride, weight_stride, first_row, block_rows, block_cols, grid_cols, eps,
    FP8: tl.constexpr, INTERLEAVED: tl.constexpr, COLUMN_TILES: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    width = rank + rope
    pairs = rope // 2
    if program < heads * COLUMN_TILES:
        head, column_tile = program // COLUMN_TILES, program % COLUMN_TILES
        query_of_head = query + head * (nope + rope)
        target = latent_query + head * width
        _absorb(
            query_of_head, query_stride, weight, scale, target, heads * width, head, column_tile,
            rows, nope, value_width, rank, weight_stride, first_row, block_rows, block_cols,
            grid_cols, FP8, BN, BC,
        )  # fmt: skip
        if column_tile == 0:
            row = tl.arange(0, 16)[:, None]
            _rotated(
                query_of_head + nope + row * query_stride, cos + row * pairs, sin + row * pairs,
                target + rank + row * heads * width, row < rows, pairs, INTERLEAVED, BP,
            )  # fmt: skip
    else:
        slot_row = program - heads * COLUMN_TILES
        c = tl.arange(0, BR)
        latent = tl.load(kv + slot_row * kv_stride + c, mask=c < rank, other=0.0)
        factor = tl.rsqrt(tl.sum(latent * latent, 0) / rank + eps)
        latent = latent * factor * tl.load(kv_norm + c, mask=c < rank, other=0.0)
        slot = tl.load(slab + slot_row).to(tl.int64) * slots_of_slab + tl.load(own + slot_row)
        kept = slots + slot * width
        rounded = latent.to(slots.dtype.element_ty)
        tl.store(kept + c, rounded, mask=c < rank)
        tl.store(new_slots + slot_row * width + c, rounded, mask=c < rank)
        key, new_key = kv + slot_row * kv_stride + rank, new_slots + slot_row * width + rank
        by, real = slot_row * pairs, slot_row < rows
        _rotated(key, cos + by, sin + by, kept + rank, real, pairs, INTERLEAVED, BP)
        _rotated(key, cos + by, sin + by, new_key, real, pairs, INTERLEAVED, BP)


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _tiles_of_part(seen, TILE_SLOTS: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.maximum(tl.cdiv(tl.cdiv(seen, TILE_SLOTS), PARTS), _LEAST_TILES)


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _attend(  # type: ignore[no-untyped-def]
    latent_query, slots, slab, begin, own, sums, statistics,
    heads, rank, rope, slots_of_slab, softmax_scale, softcap,
    SOFTCAP: tl.constexpr, PARTS: tl.constexpr,
    BH: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    part, row = tl.program_id(1), tl.program_id(2)
    width = rank + rope
    first = tl.load(begin + row)
    seen = tl.load(own + row) + 1 - first
    tiles_of_part = _tiles_of_part(seen, BN, PARTS)
    start = part * tiles_of_part * BN
    if start < seen:
        h = tl.program_id(0) * BH + tl.arange(0, BH)
        c, p = tl.arange(0, BR), tl.arange(0, BP)
        query = latent_query + (row * heads + h)[:, None] * width
        q = tl.load(query + c[None, :], mask=(h < heads)[:, None] & (c < rank)[None, :], other=0.0)
        q_key = tl.load(
            query + rank + p[None, :], mask=(h < heads)[:, None] & (p < rope)[None, :], other=0.0
        )
        kind = slots.dtype.element_ty
        base = slots + (tl.load(slab + row).to(tl.int64) * slots_of_slab + first) * width
        best = tl.full((BH,), float("-inf"), tl.float32)
        total = tl.zeros((BH,), tl.float32)
        value = tl.zeros((BH, BR), tl.float32)
        for slot in range(start, tl.minimum(start + tiles_of_part * BN, seen), BN):
            n = slot + tl.arange(0, BN)
            there = base + n.to(tl.int64)[:, None] * width
            here = (n < seen)[:, None]
            latent = tl.load(there + c[None, :], mask=here & (c < rank)[None, :], other=0.0)
            key = tl.load(there + rank + p[None, :], mask=here & (p < rope)[None, :], other=0.0)
            if kind == tl.float32:
                score = tl.dot(q, tl.trans(latent), input_precision="ieee")
                score += tl.dot(q_key, tl.trans(key), input_precision="ieee")
            else:
                score = tl.dot(q_key, tl.trans(key), tl.dot(q, tl.trans(latent)))
            score *= softmax_scale
            if SOFTCAP:
                score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
            score = tl.where((n < seen)[None, :], score * _LOG2_E, float("-inf"))
            new_best = tl.maximum(best, tl.max(score, 1))
            shrink = tl.exp2(best - new_best)
            weight = tl.exp2(score - new_best[:, None])
            total = total * shrink + tl.sum(weight, 1)
            value *= shrink[:, None]
            if kind == tl.float32:
                value += tl.dot(weight, latent, input_precision="ieee")
            else:
                value = tl.dot(weight.to(kind), latent, value)
            best = new_best
        place = (row * heads + h) * PARTS + part
        tl.store(statistics + 2 * place, best, mask=h < heads)
        tl.store(statistics + 2 * place + 1, total, mask=h < heads)
        tl.store(
            sums + place.to(tl.int64)[:, None] * rank + c[None, :], value,
            mask=(h < heads)[:, None] & (c < rank)[None, :],
        )  # fmt: skip


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _join(  # type: ignore[no-untyped-def]
    sums, statistics, begin, own, latents, heads, rank,
    PARTS: tl.constexpr, TILE_SLOTS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(0), tl.program_id(1)
    seen = tl.load(own + row) + 1 - tl.load(begin + row)
    tiles = tl.cdiv(seen, TILE_SLOTS)
    parts = tl.cdiv(tiles, _tiles_of_part(seen, TILE_SLOTS, PARTS))
    part = tl.arange(0, PARTS)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    place = (row * heads + head) * PARTS + part
    best = tl.load(statistics + 2 * place, mask=part < parts, other=float("-inf"))
    total = tl.load(statistics + 2 * place + 1, mask=part < parts, other=0.0)
    latent = tl.load(
        sums + place.to(tl.int64)[:, None] * rank + c[None, :],
        mask=(part < parts)[:, None] & (c < rank)[None, :], other=0.0,
    )  # fmt: skip
    share = tl.exp2(best - tl.max(best, 0))
    share = share / tl.sum(total * share, 0)
    latent = tl.sum(latent * share[:, None], 0)
    tl.store(latents + (row * heads + head) * rank + c, latent, mask=c < rank)


@triton.jit(do_not_specialize=["rows"])  # type: ignore[misc, untyped-decorator, unused-ignore]
def _expand(  # type: ignore[no-untyped-def]
    latents, weight, scale, out,
    rows, heads, nope, value_width, rank,
    weight_stride, first_row, block_rows, block_cols, grid_cols,
    FP8: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """A tile of one head's values of all rows."""
    head = tl.program_id(0)
    row = tl.arange(0, 16)[:, None]
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    weight_row = head * (nope + value_width) + nope + v
    weights = weight + weight_row.to(tl.int64)[:, None] * weight_stride
    scales = scale + (first_row + weight_row) // block_rows * grid_cols
    value = tl.zeros((16, BV), tl.float32)
    for first in range(0, rank, BC):
        c = first + tl.arange(0, BC)
        w = tl.load(
            weights + c[None, :], mask=(v < value_width)[:, None] & (c < rank)[None, :], other=0
        )
        x = tl.load(
            latents + (row * heads + head) * rank + c[None, :],
            mask=(row < rows) & (c < rank)[None, :], other=0.0,
        )  # fmt: skip
        if FP8:
            w = w.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32).to(tl.bfloat16)
        if w.dtype == tl.float32:
            product = tl.dot(x, tl.trans(w), input_precision="ieee")
        else:
            product = triton_linear.split_dot(x, tl.trans(w))
        if FP8:
            by = tl.load(scales + first // block_cols, mask=v < value_width, other=0.0)
            product *= by[None, :]
        value += product
    tl.store(
        out + (row * heads + head) * value_width + v[None, :], value,
        mask=(row < rows) & (v < value_width)[None, :],
    )  # fmt: skip


def _power_of_two(number: int) -> int:
    return max(16, int(triton.next_power_of_2(number)))


def fits(sizes: LatentAttention, kv_b: Weight) -> bool:
    """Whether the kernels can multiply by it: blocks of scales are not cut by their tiles."""
    return triton_linear.fits(kv_b) and sizes.rope_dim % 2 == 0


def latent_attention(
    spec: ModelSpec,
    sizes: LatentAttention,
    query_RX: torch.Tensor,
    kv_RW: torch.Tensor,
    kv_norm: torch.Tensor,
    cos_RP: torch.Tensor,
    sin_RP: torch.Tensor,
    interleaved: bool,
    kv_b: Weight,
    at: Slots,
) -> tuple[torch.Tensor, torch.Tensor]:
    """ops.latent_attention. cos and sin are dense."""
    rows, heads, device = len(query_RX), spec.num_heads, query_RX.device
    rank, rope, nope, value_width = (
        sizes.kv_lora_rank, sizes.rope_dim, sizes.nope_dim, sizes.v_dim,
    )  # fmt: skip
    slots_SCW = at.slots_SCW
    exact = slots_SCW.dtype == torch.float32
    if isinstance(kv_b, torch.Tensor):
        stored, scale, block, first_row, grid_cols = kv_b, kv_b, (1, rank), 0, 0
    else:
        stored, scale, block, first_row = kv_b.codes, kv_b.scale, kv_b.block, kv_b.first_row
        grid_cols = scale.stride(0)
    fp8 = stored.dtype == torch.uint8
    columns = _power_of_two(rank)
    tile_columns = min(columns, 128)
    while tile_columns > block[1]:
        tile_columns //= 2
    column_tiles = -(-rank // tile_columns)
    latent_query = torch.empty((rows, heads, sizes.kv_width), dtype=slots_SCW.dtype, device=device)
    new_slots = torch.empty((rows, sizes.kv_width), dtype=slots_SCW.dtype, device=device)
    _inputs[(heads * column_tiles + rows,)](
        query_RX, kv_RW, stored, scale, kv_norm, cos_RP, sin_RP, slots_SCW, at.slab_R, at.own_R,
        latent_query, new_slots, rows, heads, nope, rope, value_width, rank, slots_SCW.shape[1],
        query_RX.stride(0), kv_RW.stride(0), stored.stride(0), first_row, *block, grid_cols,
        sizes.norm_eps, FP8=fp8, INTERLEAVED=interleaved, COLUMN_TILES=column_tiles,
        BN=min(64, _power_of_two(nope)), BC=tile_columns, BP=_power_of_two(rope // 2), BR=columns,
        num_warps=4,
    )  # fmt: skip
    sums = torch.empty((rows, heads, _PARTS, rank), device=device)
    statistics = torch.empty((rows, heads, _PARTS, 2), device=device)
    tile_heads = 16 if exact or heads <= 16 else TILING.heads
    tile_slots = 32 if exact else TILING.slots
    _attend[(-(-heads // tile_heads), _PARTS, rows)](
        latent_query, slots_SCW, at.slab_R, at.begin_R, at.own_R, sums, statistics,
        heads, rank, rope, slots_SCW.shape[1], spec.softmax_scale, spec.attention_softcap,
        SOFTCAP=spec.attention_softcap > 0, PARTS=_PARTS, BH=tile_heads, BN=tile_slots,
        BR=columns, BP=_power_of_two(rope),
        num_warps=TILING.warps, num_stages=TILING.stages,
    )  # fmt: skip
    latents = torch.empty((rows, heads, rank), device=device)
    _join[(heads, rows, column_tiles)](
        sums, statistics, at.begin_R, at.own_R, latents, heads, rank,
        PARTS=_PARTS, TILE_SLOTS=tile_slots, BC=tile_columns, num_warps=4,
    )  # fmt: skip
    out = torch.empty((rows, heads * value_width), device=device)
    tile_values = min(64, _power_of_two(value_width))
    _expand[(heads, -(-value_width // tile_values))](
        latents, stored, scale, out, rows, heads, nope, value_width, rank,
        stored.stride(0), first_row, *block, grid_cols,
        FP8=fp8, BV=tile_values, BC=tile_columns, num_warps=4,
    )  # fmt: skip
    return out, new_slots
