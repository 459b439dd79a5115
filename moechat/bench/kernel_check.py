"""Right before fast: the kernels that are measured against the plain reference ones."""

from __future__ import annotations

import numpy as np

from moechat import _native
from moechat.bench.expert_layer import ExpertCalls
from moechat.bench.shapes import ExpertShape
from moechat.errors import MoechatError

MAX_RELATIVE_ERROR = 1e-2
_ROWS = 3


class KernelMismatch(MoechatError):
    """A kernel's result is not that of the reference kernel."""

    name = "kernel-mismatch"


def check_against_reference(
    model: _native.Model, pool: _native.ThreadPool, shape: ExpertShape, batch: int
) -> float:
    """Largest difference from ``ref`` over the largest value, same weights, one set of experts.

    One row and a few are computed, since they go through different code. Raises KernelMismatch
    above 1e-2, and for results that are not finite.
    """
    rows = min(batch, _ROWS)
    generator = np.random.default_rng(4)
    x = generator.standard_normal((rows, shape.hidden)).astype(np.float32)
    per_token = shape.experts_per_token
    ids = np.ascontiguousarray(
        np.broadcast_to(np.arange(per_token, dtype=np.int32), (rows, per_token))
    )
    weights = generator.uniform(0.5, 1.5, ids.shape).astype(np.float32)
    measured = _native.active_instruction_set()
    calls = ExpertCalls(model, pool)
    results = [np.array(calls.run(x[:n], ids[:n], weights[:n])) for n in {1, rows}]
    try:
        _native.force_instruction_set("ref")
        wanted = np.array(ExpertCalls(model, pool).run(x, ids, weights))
    finally:
        _native.force_instruction_set(measured)
    largest = float(np.abs(wanted).max())
    difference = max(float(np.abs(y - wanted[: len(y)]).max()) for y in results)
    error = difference / largest if largest > 0 else np.inf
    if not error <= MAX_RELATIVE_ERROR:  # NaN is no match
        raise KernelMismatch(
            f"the {measured} kernels compute something else than the reference kernels",
            f"relative difference {error:.3g}, allowed {MAX_RELATIVE_ERROR:g}",
            "Please report it with the output of `moechat bench kernels --json` on `--isa avx2`",
        )
    return error
