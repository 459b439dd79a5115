"""Weights into the second-level cache of a GPU, while it has nothing else to read."""

from __future__ import annotations

import torch  # type: ignore[import-not-found, unused-ignore]
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

_LINE_BYTES = tl.constexpr(128)
_LINES = 1024


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _prefetch(stored, num_bytes, LINES: tl.constexpr):  # type: ignore[no-untyped-def]
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    place = tl.minimum(line * _LINE_BYTES, num_bytes - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [stored.to(tl.int64) + place],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


def prefetch(stored: torch.Tensor, num_bytes: int) -> None:
    """The first bytes of a dense tensor."""
    programs = -(-num_bytes // (_LINES * _LINE_BYTES.value))
    _prefetch[(programs,)](stored, num_bytes, LINES=_LINES, num_warps=4)
