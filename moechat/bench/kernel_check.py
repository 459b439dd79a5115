"""Right before fast: the kernels that are measured against the plain reference ones."""

from __future__ import annotations

import numpy as np

from moechat import _native
from moechat.bench.expert_layer import ExpertCalls
from moechat.bench.shapes import ExpertShape
from moechat.errors import MoechatError

MAX_RELATIVE_ERROR = 1e-2
_ROWS = 3
_PREFILL_ROWS = 17  # from here on calls are of the prefill class


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
    rows = _PREFILL_ROWS if batch >= _PREFILL_ROWS else min(batch, _ROWS)
    generator = np.random.default_rng(4)
    x = generator.standard_normal((rows, shape.hidden)).astype(np.float32)
    per_token = shape.experts_per_token
    ids = np.ascontiguousarray(
        np.broadcast_to(np.arange(per_token, dtype=np.int32), (rows, per_token))
    )
    weights = generator.uniform(0.5, 1.5, ids.shape).astype(np.float32)
    measured = _native.active_instruction_set()
    one, several, wanted = (np.empty_like(x[:n]) for n in (1, rows, rows))
    calls = ExpertCalls(model, pool)
    calls.run(x[:1], ids[:1], weights[:1], one)
    calls.run(x, ids, weights, several)
    try:
        _native.force_instruction_set("ref")
        ExpertCalls(model, pool).run(x, ids, weights, wanted)
    finally:
        _native.force_instruction_set(measured)
    largest = float(np.abs(wanted).max())
    # numpy's maximum keeps a NaN.
    difference = float(np.maximum(np.abs(one - wanted[:1]).max(), np.abs(several - wanted).max()))
    error = difference / largest if largest > 0 else np.inf
    if not error <= MAX_RELATIVE_ERROR:  # NaN is no match
        raise KernelMismatch(
            f"the {measured} kernels compute something else than the reference kernels",
            f"relative difference {error:.3g}, allowed {MAX_RELATIVE_ERROR:g}",
            "Please report it; --isa forces other kernels",
        )
    return error
