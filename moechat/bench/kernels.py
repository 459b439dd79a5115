"""``bench kernels``: how near the experts' kernels come to the speed of reading memory."""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moechat import _native
from moechat.bench.bursts import FAST_BYTES_PER_SECOND, Burst, run_rounds
from moechat.bench.expert_layer import ExpertCalls, native_layer
from moechat.bench.expert_weights import map_experts
from moechat.bench.kernel_check import check_against_reference
from moechat.bench.kernel_report import moe_ffn_row
from moechat.bench.kernel_settings import KernelSettings
from moechat.bench.machine import last_level_cache_bytes, machine_facts, versions
from moechat.bench.phases import phase_times
from moechat.bench.reading import Reader
from moechat.bench.routing import Routes
from moechat.bench.shapes import ExpertShape, expert_shape
from moechat.errors import Usage, from_native

_PHASE_SECONDS = 0.1

Status = Callable[[str], None]  # a line about what goes on


def measure_kernels(settings: KernelSettings, status: Status) -> dict[str, Any]:
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
            facts, rows = _measure_format(settings, shape, format_, pools, status)
            report["weights"].append(facts)
            report["rows"] += rows
        return report
    except _native.NativeError as error:
        raise from_native(*error.args) from error
    finally:
        _native.force_instruction_set(before)
        status("")


def _frame(settings: KernelSettings, shape: ExpertShape) -> dict[str, Any]:
    return {
        "benchmark": "kernels",
        "machine": machine_facts(),
        "versions": versions(),
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
    turn: Callable[[], int]

    def call(self) -> int:
        ids, distinct = self.routes.at(self.turn())
        self.calls.run(self.x, ids, self.routes.weights, self.out)
        return distinct * self.expert_bytes


def _measure_format(
    settings: KernelSettings,
    shape: ExpertShape,
    format_: str,
    pools: dict[int, _native.ThreadPool],
    status: Status,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    weights = map_experts(
        format_,
        shape,
        settings.experts,
        lambda done, total: status(
            f"{format_}: writing weights, {done / 1e9:.1f} of {total / 1e9:.1f} GB"
        ),
    )
    num_experts = len(weights.experts)
    model = native_layer(weights, shape)
    status(f"{format_}: comparing with the reference kernels")
    most_threads = max(settings.threads)
    error = check_against_reference(model, pools[most_threads], shape, max(settings.batches))
    reader = Reader(weights.bytes, pools, settings.burst_seconds)
    reader.read_all(most_threads)
    contestants = _contestants(settings, shape, weights.expert_bytes, num_experts, model, pools)
    bursts: list[list[Burst]] = [[] for _ in contestants]
    faults_before = _major_page_faults()
    for contestant in contestants:
        contestant.call()  # buffers are allocated now
    for index, burst in run_rounds(
        contestants, reader.read, settings.bursts, settings.burst_seconds
    ):
        bursts[index].append(burst)
        status(f"{format_}: round {burst.round + 1} of {settings.bursts}")
    cache_bytes = last_level_cache_bytes()
    facts = {
        "format": format_,
        "experts": num_experts,
        "expert_bytes": weights.expert_bytes,
        "file_bytes": weights.bytes.nbytes,
        "file_over_last_level_cache": (
            None if cache_bytes is None else round(weights.bytes.nbytes / cache_bytes, 2)
        ),
        "max_relative_error": error,
        "major_page_faults": _major_page_faults() - faults_before,
    }
    rows = [
        moe_ffn_row(
            format_,
            contestant.threads,
            contestant.batch,
            own,
            bursts[0],
            contestants[0].batch,
            error,
        )
        | {"phases": phase_times(contestant.call, pools[contestant.threads], _PHASE_SECONDS)}
        for contestant, own in zip(contestants, bursts, strict=True)
    ]
    return facts, rows


def _contestants(
    settings: KernelSettings,
    shape: ExpertShape,
    expert_bytes: int,
    num_experts: int,
    model: _native.Model,
    pools: dict[int, _native.ThreadPool],
) -> Sequence[_MoeFfn]:
    # One walk for all: what one contestant has just read is not left in the caches for the next.
    turns = iter(range(1 << 62))
    generator = np.random.default_rng(3)
    x = generator.standard_normal((max(settings.batches), shape.hidden)).astype(np.float32)
    routes = {
        batch: Routes(settings.experts_hit, num_experts, shape.experts_per_token, batch)
        for batch in settings.batches
    }
    return [
        _MoeFfn(
            threads,
            batch,
            ExpertCalls(model, pools[threads]),
            routes[batch],
            x[:batch],
            np.empty((batch, shape.hidden), np.float32),
            expert_bytes,
            turns.__next__,
        )
        for threads in settings.threads
        for batch in settings.batches
    ]


def _major_page_faults() -> int:
    """Pages of this process that had to come from disk so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
