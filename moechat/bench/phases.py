"""Where the time of a burst goes: its phases, and how evenly the threads shared their tasks.

What a GPU reads passes by the threads: of it there is what the prefill counted itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moechat import _native
from moechat.bench.bursts import Work, rounded
from moechat.events import TurnStats


def phase_rows(
    burst: Callable[[], Work], pool: _native.ThreadPool, unit: str, priority: str = "decode"
) -> list[dict[str, Any]]:
    """Do ``burst`` once and return the phases that its jobs on ``pool`` had, a ``unit`` a call.

    ``open_ms_per_``... is serial; ``share_of_time`` counts it too. ``imbalance`` is the busiest
    thread's time over the mean of all: 1 when all worked alike, the number of threads when one did
    everything, None for a phase without tasks. ``priority`` is "decode" or "prefill".
    """
    pool.set_profiling(True)
    try:
        work = burst()
        phases = pool.profile(priority)
    finally:
        pool.set_profiling(False)
    return [
        {
            "phase": phase["phase"],
            f"tasks_per_{unit}": round(phase["tasks"] / work.calls, 2),
            f"ms_per_{unit}": rounded(phase["wall_seconds"] / work.calls * 1e3),
            f"open_ms_per_{unit}": rounded(phase["open_seconds"] / work.calls * 1e3),
            "share_of_time": rounded(
                (phase["wall_seconds"] + phase["open_seconds"]) / work.seconds
            ),
            "imbalance": _imbalance(phase, pool.num_threads),
        }
        for phase in phases
        if phase["busy_seconds"] > 0 or phase["open_seconds"] > 0
    ]


def device_phase_rows(stats: TurnStats, unit: str) -> list[dict[str, Any]]:
    """The same of one prompt that a GPU read: its layers, and the waits for weights.

    Nothing is told of tasks. The copies run beside both.
    """
    phases = (
        (f"layers on {stats.prefill_device}", stats.prefill_compute_seconds),
        ("waiting for weights", stats.prefill_wait_seconds),
    )
    return [
        {
            "phase": phase,
            f"tasks_per_{unit}": None,
            f"ms_per_{unit}": rounded(seconds * 1e3),
            f"open_ms_per_{unit}": None,
            "share_of_time": rounded(seconds / stats.prefill_seconds),
            "imbalance": None,
        }
        for phase, seconds in phases
    ]


def _imbalance(phase: dict[str, Any], num_threads: int) -> float | None:
    busy = phase["busy_seconds"]
    return round(phase["longest_seconds"] * num_threads / busy, 3) if busy > 0 else None
