"""Models of the oracle folders for tests of streamed weights: bound tensors, and native views."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np

from moechat import _native
from moechat.engine.loading import _weights
from moechat.engine.model_files import find_model_files
from moechat.models.spec import BoundTensor, ModelSpec

# Every stored format of folders, experts in one tensor and in many, ragged grids.
FOLDERS = (
    "deepseek_v3_fp8_odd",
    "deepseek_v3_fp8_256",
    "deepseek_v3_bf16",
    "gpt_oss_bf16",
    "gpt_oss_mxfp4",
    "olmoe",
    "gemma2",
)


def bind(folder: Path) -> tuple[ModelSpec, list[BoundTensor]]:
    files = find_model_files(folder)
    return files.spec, files.bind()


@functools.cache
def native_weights(folder: Path) -> dict[str, np.ndarray]:
    """Every role as the CPU's kernels see it: float32 [outputs, inputs], or [n]."""
    found = {}
    for tensor in bind(folder)[1]:
        for role, weight in _weights(tensor):
            if isinstance(weight, _native.MatrixView):
                rows = [_native.decode_row(weight, row) for row in range(weight.rows)]
                weight = np.stack(rows).T if weight.transposed else np.stack(rows)
            found[role] = weight
    return found
