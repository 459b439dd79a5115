"""What experts gave their tokens joins the tokens' sums, in the order of the experts' numbers.

Imports triton. Shapes: T tokens, C experts a token, R rows of pairs (token, expert), D hidden.
"""

from __future__ import annotations

from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

_BLOCK = 1024


@triton.jit(do_not_specialize=("places", "weights", "first", "last"))  # type: ignore[misc, untyped-decorator, unused-ignore]
def _combine(  # type: ignore[no-untyped-def]
    branch, weights, places, out, first, last, D, C: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    touched = 0
    for choice in range(C):
        place = tl.load(places + token * C + choice)
        touched += ((place >= first) & (place < last)).to(tl.int32)
    inside = (d < D) & (touched > 0)
    total = tl.load(out + token * D + d, mask=inside, other=0.0)
    for choice in range(C):
        place = tl.load(places + token * C + choice)
        here = (place >= first) & (place < last)
        weight = tl.load(weights + place, mask=here, other=0.0)
        row = (place - first).to(tl.int64)
        values = tl.load(branch + row * D + d, mask=inside & here, other=0.0)
        total = tl.where(here, total + weight * values, total)
    tl.store(out + token * D + d, total, mask=inside)


def combine(
    branch_RD: torch.Tensor,
    weights: torch.Tensor,
    places_TC: torch.Tensor,
    first: int,
    out_TD: torch.Tensor,
) -> None:
    """out[t] += weights[p] * branch[p - first] for the pairs p of each token that are in branch.

    ``places_TC``: the numbers of a token's pairs, rising; ``weights`` float32 by number.
    """
    num_tokens, hidden = out_TD.shape
    grid = (num_tokens, -(-hidden // _BLOCK))
    device: Any = torch.cuda.device_of  # it has no types
    with device(out_TD):
        _combine[grid](
            branch_RD, weights, places_TC, out_TD, first, first + len(branch_RD), hidden,
            C=places_TC.shape[1], BLOCK=_BLOCK,
        )  # fmt: skip
