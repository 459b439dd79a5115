"""What a reader must know before trusting figures: one line each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

UNSTEADY = 1.5  # one figure this many times another that should be the same
_LEAST_SHARE = 0.05  # of the whole model's time: smaller parts are noise


def unsteady_reading(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Of rows of as many threads: whether memory was much faster at one time than at another."""
    by_threads: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_threads.setdefault(row.get("threads", 0), []).append(row)
    text = []
    for threads, own in by_threads.items():
        slow = min(row["read_gb_per_s_min"] for row in own)
        fast = max(row["read_gb_per_s_max"] for row in own)
        if fast > UNSTEADY * slow:
            of_threads = f" with {threads} thread{'s' * (threads != 1)}" if threads else ""
            text.append(
                f"warning: plain reading{of_threads} went from {slow:.3g} to {fast:.3g} GB/s "
                "meanwhile: something else uses this machine, and the figures are rough; ratios to "
                "reading suffer least"
            )
    return text


def busy_before(machine: dict[str, Any]) -> list[str]:
    """Whether the processors had other work when the measurement began."""
    load, cpus = machine["load_average_1_minute"], machine["usable_cpus"]
    if load is None or load <= cpus:
        return []
    return [
        f"warning: the processors were busy before (load {load:.1f} on {cpus}): if other programs "
        "still run, read the ratios only"
    ]


def disagreeing_parts(report: dict[str, Any]) -> list[str]:
    """Of a synthetic model: parts of the fit that contradict each other, or the phases.

    Attention makes layers slower with the context, never faster; the rest does not depend on it.
    """
    whole, warnings = report["whole"], []
    counts = {"outside_layers": 1, "head": 1}
    counts |= {"dense_layer": whole["dense_layers"], "moe_layer": whole["moe_layers"]}
    least = _LEAST_SHARE * min(
        (row["extrapolated"]["seconds_per_token_median"] for row in whole["decode"]), default=0.0
    )
    for part, count in counts.items():
        key = f"{part}_seconds_per_token_median"
        times = [row["measured"][key] for row in whole["decode"] if key in row["measured"]]
        if times and count * max(times) >= least and _disagree(times, part[-5:] == "layer"):
            warnings.append(_warning(part, times, "from context to context"))
    for row, built in zip(whole["decode"], report["decode"]):
        phases = [p["ms_per_token"] / 1e3 for p in built["phases"] if p["phase"] == "head"]
        times = [row["measured"].get("head_seconds_per_token_median", 0.0), sum(phases)]
        if phases and max(times) >= least and _disagree(times, False):
            warnings.append(_warning("head", times, "by differences and by phases"))
            break
    return warnings


def _disagree(seconds: Sequence[float], may_grow: bool) -> bool:
    if may_grow:
        return any(a > UNSTEADY * b for i, a in enumerate(seconds) for b in seconds[i + 1 :])
    return max(seconds) > UNSTEADY * min(seconds)


def _warning(part: str, seconds: Sequence[float], where: str) -> str:
    times = ", ".join(f"{1e3 * each:.3g}" for each in seconds)
    return (
        f"warning: {part.replace('_', ' ')} takes {times} ms {where}, which should agree: what is "
        "extrapolated is rough; more --repetitions on a quiet machine help"
    )
