"""Whether there are kernels for a device: triton's, which torch for CUDA brings along."""

from __future__ import annotations

import functools
from types import ModuleType


@functools.cache
def gemm_kernels(device_type: str) -> ModuleType | None:
    """The module triton_gemm for "cuda", None elsewhere and where triton is missing."""
    if device_type != "cuda":
        return None
    try:
        from moechat.gpu_weights import triton_gemm
    except ImportError:
        return None
    return triton_gemm
