"""Where the time of a call goes: its phases, and how evenly the threads shared their tasks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from moechat import _native
from moechat.bench.bursts import burst


def phase_times(
    call: Callable[[], int], pool: _native.ThreadPool, seconds: float
) -> list[dict[str, Any]]:
    """Repeat ``call`` for some seconds and return the phases that its jobs on ``pool`` had.

    ``open_ms_per_call`` is serial. ``imbalance`` is the busiest thread's time over the mean of all:
    1 when all worked alike, the number of threads when one did everything.
    """
    pool.set_profiling(True)
    try:
        calls, _, _ = burst(call, seconds, time.perf_counter)
        phases = pool.profile("decode")
    finally:
        pool.set_profiling(False)
    return [
        {
            "phase": phase["phase"].removeprefix("experts."),
            "tasks_per_call": round(phase["tasks"] / calls, 2),
            "ms_per_call": float(f"{phase['wall_seconds'] / calls * 1e3:.4g}"),
            "open_ms_per_call": float(f"{phase['open_seconds'] / calls * 1e3:.4g}"),
            "imbalance": round(phase["longest_seconds"] * pool.num_threads / busy, 3),
        }
        for phase in phases
        if (busy := phase["busy_seconds"]) > 0
    ]
