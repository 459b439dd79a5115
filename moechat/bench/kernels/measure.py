"""The measurement: weights, a check against the reference, then calls between plain reading."""

from __future__ import annotations

import dataclasses
import itertools
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from moechat import _native
from moechat.bench.bursts import FAST_BYTES_PER_SECOND, Burst, Work, repeat, rounded, run_rounds
from moechat.bench.kernels.expert_layer import ExpertCalls, check_against_reference, native_layer
from moechat.bench.kernels.expert_weights import ExpertWeights, map_experts
from moechat.bench.kernels.experts import ExpertShape, Routes, expert_shape
from moechat.bench.kernels.report import moe_ffn_row
from moechat.bench.machine import last_level_cache_bytes, machine_facts
from moechat.bench.phases import phase_rows
from moechat.bench.reading import Reader
from moechat.bench.settings import KernelSettings
from moechat.bench.status_line import Show, written_bytes
from moechat.errors import Usage, from_native


def measure_kernels(settings: KernelSettings, show: Show) -> dict[str, Any]:
    """Measure and return the report, ready for JSON. Raises MoechatError.

    Not for use while an engine computes: the instruction set may be switched for a moment.
    """
    from moechat.engine.loading import choose_instruction_set

    shape = expert_shape(settings.shape)
    if settings.experts is not None and settings.experts < shape.experts_per_token:
        raise Usage(
            f"--experts {settings.experts} are too few",
            f"a token of {shape.name} uses {shape.experts_per_token} at once",
        )
    before = _native.active_instruction_set()
    try:
        choose_instruction_set()
        if settings.isa is not None:
            _native.force_instruction_set(settings.isa)
        pools = {threads: _native.ThreadPool(threads) for threads in settings.threads}
        report = _frame(settings, shape)
        for format_ in settings.formats:
            facts, rows = _measure_format(settings, shape, format_, pools, show)
            report["weights"].append(facts)
            report["rows"] += rows
        return report
    except _native.NativeError as error:
        raise from_native(*error.args) from error
    finally:
        _native.force_instruction_set(before)


def _frame(settings: KernelSettings, shape: ExpertShape) -> dict[str, Any]:
    return {
        "benchmark": "kernels",
        **machine_facts(),
        "shape": dataclasses.asdict(shape),
        "settings": {
            "experts_hit": settings.experts_hit,
            "bursts": settings.bursts,
            "burst_seconds": settings.burst_seconds,
            "fast_regime_min_read_gb_per_s": FAST_BYTES_PER_SECOND / 1e9,
        },
        "weights": [],
        "rows": [],
    }


@dataclass
class _MoeFfn:
    """Routed experts of ``batch`` rows with one pool; successive calls use other experts."""

    threads: int
    batch: int
    calls: ExpertCalls
    routes: Routes
    x: _native.Float32
    out: _native.Float32
    expert_bytes: int
    turns: Iterator[int]
    burst_seconds: float

    def call(self) -> int:
        ids, distinct = self.routes.at(next(self.turns))
        self.calls.run(self.x, ids, self.routes.weights, self.out)
        return distinct * self.expert_bytes

    def burst(self) -> Work:
        return repeat(self.call, self.burst_seconds)


def _measure_format(
    settings: KernelSettings,
    shape: ExpertShape,
    format_: str,
    pools: dict[int, _native.ThreadPool],
    show: Show,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    progress = written_bytes(show, f"{format_}: writing weights")
    weights = map_experts(format_, shape, settings.experts, progress)
    model = native_layer(weights.experts, shape)
    show(f"{format_}: comparing with the reference kernels")
    most_threads = max(settings.threads)
    error = rounded(
        check_against_reference(model, pools[most_threads], shape, max(settings.batches))
    )
    reader = Reader([weights.bytes], pools, settings.burst_seconds)
    reader.read_all(most_threads)
    contestants = _contestants(settings, shape, weights, model, pools)
    bursts: list[list[Burst]] = [[] for _ in contestants]
    faults_before = _major_page_faults()
    for contestant in contestants:
        contestant.call()  # buffers are allocated now
    for index, burst in run_rounds(contestants, reader.read, settings.bursts):
        bursts[index].append(burst)
        show(f"{format_}: round {burst.round + 1} of {settings.bursts}")
    cache_bytes = last_level_cache_bytes()
    facts = {
        "format": format_,
        "experts": len(weights.experts),
        "expert_bytes": weights.expert_bytes,
        "file_bytes": weights.bytes.nbytes,
        "file_over_last_level_cache": (
            None if cache_bytes is None else round(weights.bytes.nbytes / cache_bytes, 2)
        ),
        "max_relative_error": error,
        "major_page_faults": _major_page_faults() - faults_before,
    }
    first_batch = contestants[0].batch
    rows = [
        moe_ffn_row(format_, its.threads, its.batch, own, bursts[0], first_batch)
        | {"max_relative_error": error, "phases": phase_rows(its.burst, pools[its.threads], "call")}
        for its, own in zip(contestants, bursts, strict=True)
    ]
    return facts, rows


def _contestants(
    settings: KernelSettings,
    shape: ExpertShape,
    weights: ExpertWeights,
    model: _native.Model,
    pools: dict[int, _native.ThreadPool],
) -> list[_MoeFfn]:
    # One walk for all: what one contestant has just read is not left in the caches for the next.
    turns = itertools.count()
    generator = np.random.default_rng(3)
    x = generator.standard_normal((max(settings.batches), shape.hidden)).astype(np.float32)
    routes = {
        batch: Routes(settings.experts_hit, len(weights.experts), shape.experts_per_token, batch)
        for batch in settings.batches
    }
    return [
        _MoeFfn(
            threads=threads,
            batch=batch,
            calls=ExpertCalls(model, pools[threads]),
            routes=routes[batch],
            x=x[:batch],
            out=np.empty((batch, shape.hidden), np.float32),
            expert_bytes=weights.expert_bytes,
            turns=turns,
            burst_seconds=settings.burst_seconds,
        )
        for threads in settings.threads
        for batch in settings.batches
    ]


def _major_page_faults() -> int:
    """Pages of this process that had to come from disk so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
