"""Route, post and wait on a GPU; cpp/decode/mailbox.h has the layout and the order of the words.

The mailbox is host memory. It is written with ordinary stores, fenced for the whole system before
the request's number, and read past the caches. Whether a wait goes on is decided by one thread for
its block. Shapes: R rows, D hidden, E experts, N groups of them, k experts a token.
"""

from __future__ import annotations

import torch  # type: ignore[import-not-found, unused-ignore]
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from triton.language.extra import cuda  # type: ignore[import-not-found, import-untyped, unused-ignore]

from moechat.decode.gpu.mailbox import ABORTED, GAVE_UP, LINE_BYTES, Mailbox
from moechat.decode.gpu.weight_views import Norm
from moechat.models.spec import MoeSpec

_SCORINGS = {"sigmoid": 1, "softmax": 2, "softmax_chosen": 3}
_LEAST_SUM = tl.constexpr(1e-20)
_LOWEST = tl.constexpr(-3.4028234663852886e38)
_LINE_WORDS = tl.constexpr(LINE_BYTES // 4)
_GAVE_UP, _ABORTED = tl.constexpr(GAVE_UP), tl.constexpr(ABORTED)
_TAKEN = tl.constexpr(-(2**63))
_COPY_COLS = 512


def _interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, which has no assembler and no timer."""
    return not isinstance(_wait, triton.JITFunction)


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _fence(INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of every thread, for the whole system."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _store_for_host(word, value, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    """A store that leaves the GPU's caches at once; an ordinary one may stay there for long."""
    if INTERPRETED:
        tl.store(word, value)
    else:
        tl.inline_asm_elementwise(
            "st.release.sys.global.b32 [$1], $2; fence.acq_rel.sys; mov.u32 $0, 0;", "=r,l,r",
            [word.to(tl.int64), value], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _keys(value, index):  # type: ignore[no-untyped-def]
    """int64 that are in the order of the values, of equal ones the lower index first."""
    value = tl.where(value == 0.0, 0.0, value)  # both zeros are equal
    bits = value.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _index_of(key):  # type: ignore[no-untyped-def]
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _kept_groups(  # type: ignore[no-untyped-def]
    select, real, group_size, SCORING: tl.constexpr, KEPT: tl.constexpr, GROUPS: tl.constexpr,
    BG: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Whether each of [BG, BS] is in a kept group: bool [BG, 1]."""
    column = tl.arange(0, BS)[None, :]
    group = tl.arange(0, BG)
    keys = tl.where(real, _keys(select, tl.broadcast_to(column, (BG, BS))), _TAKEN)
    first = tl.max(keys, 1)
    first_column = _index_of(first)
    counted = tl.sum(tl.where(column == first_column[:, None], select, 0.0), 1)
    if SCORING == 1 and group_size > 1:
        second = tl.max(tl.where(column == first_column[:, None], _TAKEN, keys), 1)
        counted += tl.sum(tl.where(column == _index_of(second)[:, None], select, 0.0), 1)
    counted = tl.where(counted != counted, float("-inf"), counted)
    group_keys = tl.where(group < GROUPS, _keys(counted, group), _TAKEN)
    kept = group < 0
    for _ in tl.static_range(KEPT):
        best = _index_of(tl.max(group_keys, 0))
        kept |= group == best
        group_keys = tl.where(group == best, _TAKEN, group_keys)
    return kept[:, None]


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _route_row(  # type: ignore[no-untyped-def]
    logits, correction, group_size, routed_scaling,
    SCORING: tl.constexpr, CORRECTED: tl.constexpr, NORMALISED: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, CHOSEN: tl.constexpr,
    BG: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """(ids int32 [BC], weights float32 [BC]) of one row of logits."""
    group, column = tl.arange(0, BG)[:, None], tl.arange(0, BS)[None, :]
    expert = group * group_size + column
    real = (group < GROUPS) & (column < group_size)
    logit = tl.load(logits + expert, mask=real, other=float("-inf"))
    if SCORING == 1:
        score = 1.0 / (1.0 + tl.exp(-logit))
    elif SCORING == 2:
        best_logit = tl.max(tl.max(tl.where(logit != logit, float("-inf"), logit), 1), 0)
        exponential = tl.where(real, tl.exp(logit - best_logit), 0.0)
        score = exponential / tl.sum(tl.sum(exponential, 1), 0)
    else:
        score = logit
    select = score
    if CORRECTED:
        select += tl.load(correction + expert, mask=real, other=0.0)
    select = tl.where(select != select, float("-inf"), select)
    if KEPT < GROUPS:
        kept = _kept_groups(select, real, group_size, SCORING, KEPT, GROUPS, BG, BS)
        select = tl.where(kept, tl.maximum(select, _LOWEST), float("-inf"))
    keys = tl.where(real, _keys(select, expert), _TAKEN)
    place = tl.arange(0, BC)
    ids = tl.zeros((BC,), tl.int32)
    weights = tl.zeros((BC,), tl.float32)
    for number in tl.static_range(CHOSEN):
        best = _index_of(tl.max(tl.max(keys, 1), 0))
        weight = tl.sum(tl.sum(tl.where(expert == best, score, 0.0), 1), 0)
        keys = tl.where(expert == best, _TAKEN, keys)
        ids = tl.where(place == number, best, ids)
        weights = tl.where(place == number, weight, weights)
    if SCORING == 3:
        shown = tl.where(place < CHOSEN, weights, float("-inf"))
        exponential = tl.exp(shown - tl.max(shown, 0))
        weights = exponential / tl.sum(exponential, 0)
    if NORMALISED:
        sums = tl.sum(tl.where(place < CHOSEN, weights, 0.0), 0) + _LEAST_SUM
        weights *= routed_scaling / sums
    else:
        weights *= routed_scaling
    return ids, weights


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _route_and_post(  # type: ignore[no-untyped-def]
    logits, correction, ids, weights, x, norm,
    request, box_x, box_ids, box_weights, sequence, error, num_rows, arrived,
    logits_stride, x_stride, hidden, group_size, routed_scaling, eps,
    ROUTE: tl.constexpr, POST: tl.constexpr, NORM: tl.constexpr, INTERPRETED: tl.constexpr,
    SCORING: tl.constexpr, CORRECTED: tl.constexpr, NORMALISED: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, CHOSEN: tl.constexpr,
    BG: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    posts = False
    if POST:
        posts = (row < tl.load(num_rows)) & (tl.load(error) == 0)
        if (row == 0) & (part == 0) & posts:
            tl.store(request + 3 * _LINE_WORDS, tl.load(num_rows))
    if part == 0:
        place = tl.arange(0, BC)
        real = place < CHOSEN
        if ROUTE:
            row_ids, row_weights = _route_row(
                logits + row * logits_stride, correction, group_size, routed_scaling,
                SCORING, CORRECTED, NORMALISED, GROUPS, KEPT, CHOSEN, BG, BS, BC,
            )  # fmt: skip
            tl.store(ids + row * CHOSEN + place, row_ids, mask=real)
            tl.store(weights + row * CHOSEN + place, row_weights, mask=real)
        else:
            row_ids = tl.load(ids + row * CHOSEN + place, mask=real)
            row_weights = tl.load(weights + row * CHOSEN + place, mask=real)
        if posts:
            tl.store(box_ids + row * CHOSEN + place, row_ids, mask=real)
            tl.store(box_weights + row * CHOSEN + place, row_weights, mask=real)
    elif posts:
        d = tl.arange(0, BD)
        value = tl.load(x + row * x_stride + d, mask=d < hidden, other=0.0)
        if NORM:
            scale = tl.rsqrt(tl.sum(value * value, 0) / hidden + eps)
            value = value * scale * tl.load(norm + d, mask=d < hidden, other=0.0)
        tl.store(box_x + row * hidden + d, value, mask=d < hidden)
    if POST:
        _fence(INTERPRETED)
        tl.debug_barrier()
        all_programs = tl.num_programs(0) * tl.num_programs(1)
        if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == all_programs - 1:
            tl.store(arrived, 0)
            if tl.load(error) == 0:
                number = tl.load(sequence) + 1  # wraps around
                tl.store(sequence, number)
                _store_for_host(request, number, INTERPRETED)


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _nanoseconds(thread, before, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The clock of the block's first thread; interpreted, a tick more than before."""
    if INTERPRETED:
        return before + 100000
    return tl.sum(tl.where(thread == 0, cuda.globaltimer(), 0), 0)


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _poll_host(  # type: ignore[no-untyped-def]
    reply, wanted, limit_nanoseconds, THREADS: tl.constexpr, INTERPRETED: tl.constexpr
):
    """0 once the reply is there, or why none will come."""
    thread = tl.arange(0, THREADS)
    outcome = wanted * 0
    waiting = wanted == wanted
    began = _nanoseconds(thread, wanted.to(tl.int64) * 0, INTERPRETED)
    now = began
    while waiting:
        # The first thread reads the reply, the second the word after it: abort.
        word = tl.load(reply + thread * _LINE_WORDS, mask=thread < 2, other=0, volatile=True)
        words = tl.sum((word.to(tl.int64) & 0xFFFFFFFF) << (32 * thread), 0)
        if words.to(tl.int32) == wanted:
            waiting = wanted != wanted
        else:
            now = _nanoseconds(thread, now, INTERPRETED)
            if (words >> 32) != 0:
                outcome = outcome * 0 + _ABORTED
                waiting = wanted != wanted
            elif now - began > limit_nanoseconds:
                outcome = outcome * 0 + _GAVE_UP
                waiting = wanted != wanted
    return outcome


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _wait(  # type: ignore[no-untyped-def]
    reply, sequence, error, answered, num_rows, limit, y, x, out,
    hidden, x_stride, out_stride, rows,
    BR: tl.constexpr, BD: tl.constexpr, THREADS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    # The first block alone reads the host's words, whose readers would take turns; the others
    # wait for it, which is bounded as it is.
    row = tl.arange(0, BR)[:, None]
    d = tl.program_id(0) * BD + tl.arange(0, BD)[None, :]
    real = (row < rows) & (d < hidden)
    value = tl.load(x + row * x_stride + d, mask=real, other=0.0)
    live = tl.load(num_rows)
    wanted = tl.load(sequence)
    outcome = tl.load(error)
    if outcome == 0:
        if tl.program_id(0) == 0:
            outcome = _poll_host(reply, wanted, tl.load(limit), THREADS, INTERPRETED)
            if outcome != 0:
                tl.store(error, outcome)
            _fence(INTERPRETED)
            tl.debug_barrier()
            tl.store(answered, wanted)
        else:
            thread = tl.arange(0, THREADS)
            seen = wanted - 1
            while seen != wanted:
                word = tl.load(answered + thread * 0, mask=thread < 1, other=0, volatile=True)
                seen = tl.sum(word, 0)
            _fence(INTERPRETED)
            tl.debug_barrier()
            outcome = tl.sum(
                tl.load(error + thread * 0, mask=thread < 1, other=0, volatile=True), 0
            )
    if outcome == 0:
        value += tl.load(
            y + row * hidden + d, mask=real & (row < live), other=0.0, cache_modifier=".cv"
        )
    tl.store(out + row * out_stride + d, value, mask=real)


def _power_of_two(number: int) -> int:
    return int(triton.next_power_of_2(number))


def route_and_post(
    moe: MoeSpec | None,
    logits_RE: torch.Tensor | None,
    correction_E: torch.Tensor | None,
    ids_Rk: torch.Tensor,
    weights_Rk: torch.Tensor,
    x_RD: torch.Tensor | None,
    mailbox: Mailbox | None,
    norm: Norm | None,
) -> None:
    """Routes if there are logits, into ids and weights; posts if there is a mailbox."""
    rows, chosen = ids_Rk.shape
    route = logits_RE is not None and moe is not None
    group_size = moe.num_experts // moe.num_groups if moe else 1
    hidden = x_RD.shape[1] if x_RD is not None else 1
    logits = logits_RE if logits_RE is not None else weights_Rk
    x = x_RD if x_RD is not None else weights_Rk
    post = mailbox is not None
    box = mailbox
    _route_and_post[(rows, 2 if post else 1)](
        logits, correction_E if correction_E is not None else logits, ids_Rk, weights_Rk,
        x, norm.weight if norm else x,
        box.request if box else ids_Rk, box.x if box else x, box.ids if box else ids_Rk,
        box.weights if box else weights_Rk, box.sequence if box else ids_Rk,
        box.error if box else ids_Rk, box.num_rows if box else ids_Rk,
        box.arrived if box else ids_Rk,
        logits.stride(0), x.stride(0), hidden, group_size,
        moe.routed_scaling if moe else 1.0, norm.eps if norm else 0.0,
        ROUTE=route, POST=post, NORM=norm is not None, INTERPRETED=_interpreted(),
        SCORING=_SCORINGS[moe.scoring] if moe else 1, CORRECTED=correction_E is not None,
        NORMALISED=moe.normalise_weights if moe else False,
        GROUPS=moe.num_groups if moe else 1, KEPT=moe.num_groups_kept if moe else 1,
        CHOSEN=chosen, BG=_power_of_two(moe.num_groups if moe else 1),
        BS=_power_of_two(group_size), BC=_power_of_two(chosen), BD=_power_of_two(hidden),
        num_warps=4,
    )  # fmt: skip


def wait(mailbox: Mailbox, x_RD: torch.Tensor, out_RD: torch.Tensor) -> None:
    """ops.wait."""
    rows, hidden = x_RD.shape
    _wait[(-(-hidden // _COPY_COLS),)](
        mailbox.reply, mailbox.sequence, mailbox.error, mailbox.answered, mailbox.num_rows,
        mailbox.limit, mailbox.y, x_RD, out_RD, hidden, x_RD.stride(0), out_RD.stride(0), rows,
        BR=_power_of_two(rows), BD=_COPY_COLS, THREADS=128, INTERPRETED=_interpreted(),
        num_warps=4,
    )  # fmt: skip
