"""Engines whose decode steps run on torch's CPU device, their experts served as for a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moechat.decode.gpu.hybrid_loop import HybridDecode
from moechat.engine.engine import Engine
from moechat.engine.model_files import find_model_files


def with_hybrid(
    engine: Engine, folder: Path, *, gpu_experts: int = 0, **settings: Any
) -> HybridDecode:
    """Make the engine's decode thread use it from now on; no request has been made yet."""
    tensors = find_model_files(folder).bind()
    settings.setdefault("device", "cpu")
    settings.setdefault("anti_phase", True)
    hybrid = HybridDecode(
        engine.spec,
        tensors,
        engine.model.native,
        engine.pool,
        compute=engine.compute,
        **settings,
    )
    if gpu_experts:
        hybrid.hold_experts(gpu_experts)
    engine.decode.device = hybrid
    return hybrid
