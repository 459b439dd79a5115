"""The kernel of host_read: bytes of page-locked memory, past the caches."""

from __future__ import annotations

from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

_BLOCK = 1024
_device_of: Any = torch.cuda.device_of  # it has no types


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _read(out, source, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    tl.store(out + place, tl.load(source + place, mask=mask, cache_modifier=".cv"), mask=mask)


def read(out: torch.Tensor, source: torch.Tensor) -> None:
    """host_read.from_host on a GPU."""
    there, here = (tensor.view(-1).view(torch.uint8) for tensor in (out, source))
    for dtype in (torch.int64, torch.int32, torch.int16):
        size = dtype.itemsize
        if not any(value % size for value in (len(here), there.data_ptr(), here.data_ptr())):
            there, here = there.view(dtype), here.view(dtype)
            break
    with _device_of(out):
        _read[(triton.cdiv(len(here), _BLOCK),)](there, here, len(here), BLOCK=_BLOCK)
