"""Whether there are kernels for a device: triton's, which torch for CUDA brings along."""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType


@functools.cache
def has_kernels(device_type: str) -> bool:
    """Whether triton's kernels run there."""
    return device_type == "cuda" and importlib.util.find_spec("triton") is not None


@functools.cache
def gemm_kernels(device_type: str) -> ModuleType | None:
    """The module triton_gemm where there are kernels, None elsewhere."""
    if not has_kernels(device_type):
        return None
    from moechat.gpu_weights import triton_gemm

    return triton_gemm
