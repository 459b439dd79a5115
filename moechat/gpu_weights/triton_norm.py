"""Root mean square norms in one launch: a program has one span of one row, whatever the others are.

Imports triton. Shapes: T tokens, K elements of a row, N of a span of it, as many as weights.
"""

from __future__ import annotations

from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _norm(  # type: ignore[no-untyped-def]
    x, weight, out, stride_x, spans, eps, N, BLOCK: tl.constexpr
):
    row = (tl.program_id(0) // spans).to(tl.int64)
    begin = tl.program_id(0) % spans * N
    n = tl.arange(0, BLOCK)
    inside = n < N
    values = tl.load(x + row * stride_x + begin + n, mask=inside, other=0.0)
    scale = tl.rsqrt(tl.sum(values * values, 0) / N + eps)
    weights = tl.load(weight + n, mask=inside, other=0.0)
    normed = (values * scale) * weights
    tl.store(out + row * (spans * N) + begin + n, normed.to(out.dtype.element_ty), mask=inside)


def norm(
    x_TK: torch.Tensor, weight_N: torch.Tensor, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    """[T, K] in ``dtype``, dense, of float32 rows that are dense in themselves."""
    num_tokens, width = x_TK.shape
    out_TK = torch.empty((num_tokens, width), dtype=dtype, device=x_TK.device)
    spans = width // len(weight_N)
    if num_tokens * spans:
        block = triton.next_power_of_2(len(weight_N))
        device: Any = torch.cuda.device_of  # it has no types
        with device(x_TK):
            _norm[(num_tokens * spans,)](
                x_TK, weight_N, out_TK, x_TK.stride(0), spans, eps, len(weight_N),
                BLOCK=block, num_warps=max(1, min(8, block // 512)),
            )  # fmt: skip
    return out_TK
