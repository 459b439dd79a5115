"""Grouped attention of at most 16 rows to the slots of their caches, and the parts joined.

As triton_latent.py: slots are cut into parts by how many a row sees, matrix inputs have the
slots' type, sums are float32.

Shapes: R rows, H query heads, G heads of keys and values, d their width, S parts.
"""

from __future__ import annotations

import torch  # type: ignore[import-not-found, unused-ignore]
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from moechat.decode.gpu.weight_views import Slots
from moechat.models.spec import GroupedAttention, ModelSpec

_PARTS = 16
_TILE_SLOTS = 64
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _attend(  # type: ignore[no-untyped-def]
    query, slots, slab, begin, own, sums, statistics,
    heads, groups, head_width, slots_of_slab, softmax_scale, softcap,
    SOFTCAP: tl.constexpr, PARTS: tl.constexpr, HEAD_TILES: tl.constexpr,
    BH: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    group, head_tile = tl.program_id(0) // HEAD_TILES, tl.program_id(0) % HEAD_TILES
    part, row = tl.program_id(1), tl.program_id(2)
    width = 2 * groups * head_width
    heads_of_group = heads // groups
    first = tl.load(begin + row)
    seen = tl.load(own + row) + 1 - first
    tiles_of_part = tl.cdiv(tl.cdiv(seen, BN), PARTS)
    start = part * tiles_of_part * BN
    if start < seen:
        of_group = head_tile * BH + tl.arange(0, BH)
        h = group * heads_of_group + of_group
        d = tl.arange(0, BD)
        real = (of_group < heads_of_group)[:, None] & (d < head_width)[None, :]
        kind = slots.dtype.element_ty
        place_of_query = (row * heads + h)[:, None] * head_width + d[None, :]
        q = tl.load(query + place_of_query, mask=real, other=0.0).to(kind)
        base = slots + (tl.load(slab + row).to(tl.int64) * slots_of_slab + first) * width
        best = tl.full((BH,), float("-inf"), tl.float32)
        total = tl.zeros((BH,), tl.float32)
        value = tl.zeros((BH, BD), tl.float32)
        for slot in range(start, tl.minimum(start + tiles_of_part * BN, seen), BN):
            n = slot + tl.arange(0, BN)
            here = (n < seen)[:, None] & (d < head_width)[None, :]
            there = base + n.to(tl.int64)[:, None] * width + group * head_width + d[None, :]
            key = tl.load(there, mask=here, other=0.0)
            held = tl.load(there + groups * head_width, mask=here, other=0.0)
            if kind == tl.float32:
                score = tl.dot(q, tl.trans(key), input_precision="ieee")
            else:
                score = tl.dot(q, tl.trans(key))
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
                value += tl.dot(weight, held, input_precision="ieee")
            else:
                value = tl.dot(weight.to(kind), held, value)
            best = new_best
        place = (row * heads + h) * PARTS + part
        tl.store(statistics + 2 * place, best, mask=of_group < heads_of_group)
        tl.store(statistics + 2 * place + 1, total, mask=of_group < heads_of_group)
        tl.store(sums + place.to(tl.int64)[:, None] * head_width + d[None, :], value, mask=real)


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _join(  # type: ignore[no-untyped-def]
    sums, statistics, begin, own, sinks, out, heads, head_width,
    SINKS: tl.constexpr, PARTS: tl.constexpr, TILE_SLOTS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(0), tl.program_id(1)
    tiles = tl.cdiv(tl.load(own + row) + 1 - tl.load(begin + row), TILE_SLOTS)
    parts = tl.cdiv(tiles, tl.cdiv(tiles, PARTS))
    part, d = tl.arange(0, PARTS), tl.arange(0, BD)
    place = (row * heads + head) * PARTS + part
    best = tl.load(statistics + 2 * place, mask=part < parts, other=float("-inf"))
    total = tl.load(statistics + 2 * place + 1, mask=part < parts, other=0.0)
    most = tl.max(best, 0)
    if SINKS:
        sink = tl.load(sinks + head) * _LOG2_E
        most = tl.maximum(most, sink)
    share = tl.exp2(best - most)
    all_shares = tl.sum(total * share, 0)
    if SINKS:
        all_shares += tl.exp2(sink - most)
    value = tl.load(
        sums + place.to(tl.int64)[:, None] * head_width + d[None, :],
        mask=(part < parts)[:, None] & (d < head_width)[None, :], other=0.0,
    )  # fmt: skip
    value = tl.sum(value * (share / all_shares)[:, None], 0)
    tl.store(out + (row * heads + head) * head_width + d, value, mask=d < head_width)


def attend(
    spec: ModelSpec,
    sizes: GroupedAttention,
    q_RHd: torch.Tensor,
    sinks_H: torch.Tensor | None,
    at: Slots,
) -> torch.Tensor:
    """float32 [R, H * d] of queries that are normed and rotated; the new slots are in the cache."""
    rows, heads, device = len(q_RHd), spec.num_heads, q_RHd.device
    width, groups, slots_SCW = sizes.head_dim, sizes.num_kv_heads, at.slots_SCW
    columns = max(16, int(triton.next_power_of_2(width)))
    tile_heads = min(64, max(16, int(triton.next_power_of_2(heads // groups))))
    head_tiles = -(-(heads // groups) // tile_heads)
    sums = torch.empty((rows, heads, _PARTS, width), device=device)
    statistics = torch.empty((rows, heads, _PARTS, 2), device=device)
    _attend[(groups * head_tiles, _PARTS, rows)](
        q_RHd, slots_SCW, at.slab_R, at.begin_R, at.own_R, sums, statistics,
        heads, groups, width, slots_SCW.shape[1], spec.softmax_scale, spec.attention_softcap,
        SOFTCAP=spec.attention_softcap > 0, PARTS=_PARTS, HEAD_TILES=head_tiles,
        BH=tile_heads, BN=_TILE_SLOTS, BD=columns, num_warps=4, num_stages=2,
    )  # fmt: skip
    out = torch.empty((rows, heads * width), device=device)
    _join[(heads, rows)](
        sums, statistics, at.begin_R, at.own_R, sinks_H if sinks_H is not None else sums, out,
        heads, width, SINKS=sinks_H is not None, PARTS=_PARTS, TILE_SLOTS=_TILE_SLOTS, BD=columns,
        num_warps=4,
    )  # fmt: skip
    return out
