"""Phase times of a scripted pool."""

from __future__ import annotations

import pytest

from moechat.bench.bursts import Work
from moechat.bench.phases import device_phase_rows, phase_rows
from moechat.events import TurnStats


class Pool:
    """Reports times of two calls on 4 threads."""

    num_threads = 4

    def __init__(self):
        self.profiling = []

    def set_profiling(self, on):
        self.profiling.append(on)

    def profile(self, priority):
        assert priority == "prefill" and self.profiling == [True]
        usual = {"count": 2, "tasks": 12, "open_seconds": 0.004, "wall_seconds": 0.02}
        even = usual | {"phase": "experts.down", "busy_seconds": 0.08, "longest_seconds": 0.02}
        alone = usual | {"phase": "other", "busy_seconds": 0.02, "longest_seconds": 0.02}
        nothing = usual | {"phase": "experts.sum", "busy_seconds": 0.0, "longest_seconds": 0.0}
        serial = nothing | {"phase": "router"}
        nothing["open_seconds"] = 0.0
        return [even, alone, nothing, serial]


def test_times_are_per_call_and_imbalance_is_over_the_mean():
    pool = Pool()
    down, other, router = phase_rows(lambda: Work(2, 0.06, 0.0, 0), pool, "prompt", "prefill")
    assert pool.profiling == [True, False]
    assert (down["phase"], down["tasks_per_prompt"], down["ms_per_prompt"]) == (
        ("experts.down", 6, 10)
    )
    assert (down["open_ms_per_prompt"], down["imbalance"]) == (2, 1)
    assert down["share_of_time"] == 0.4  # 24 of 60 ms
    assert (other["phase"], other["imbalance"]) == ("other", 4)
    assert (router["phase"], router["imbalance"]) == ("router", None)
    assert router["open_ms_per_prompt"] == 2


def test_profiling_ends_with_an_error_too():
    pool = Pool()

    def fail():
        raise RuntimeError

    with pytest.raises(RuntimeError):
        phase_rows(fail, pool, "call")
    assert pool.profiling == [True, False]


def test_a_gpus_phases_are_those_of_the_prefills_own_clock():
    stats = TurnStats(
        prefill_seconds=2.0, prefill_compute_seconds=1.5, prefill_wait_seconds=0.25,
        prefill_device="cuda:0",
    )  # fmt: skip
    layers, waiting = device_phase_rows(stats, "prompt")
    assert (layers["phase"], layers["ms_per_prompt"]) == ("layers on cuda:0", 1500)
    assert (layers["share_of_time"], waiting["share_of_time"]) == (0.75, 0.125)
    assert layers["imbalance"] is layers["open_ms_per_prompt"] is None
