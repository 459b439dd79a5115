"""Phase times of a scripted pool."""

from __future__ import annotations

from moechat.bench.phases import phase_times


class Pool:
    """Reports times of one call on 4 threads."""

    num_threads = 4

    def __init__(self):
        self.profiling = []

    def set_profiling(self, on):
        self.profiling.append(on)

    def profile(self, priority):
        assert priority == "decode" and self.profiling == [True]
        usual = {"count": 1, "tasks": 6, "open_seconds": 0.002, "wall_seconds": 0.01}
        even = usual | {"phase": "experts.down", "busy_seconds": 0.04, "longest_seconds": 0.01}
        alone = usual | {"phase": "other", "busy_seconds": 0.01, "longest_seconds": 0.01}
        nothing = usual | {"phase": "experts.sum", "busy_seconds": 0.0, "longest_seconds": 0.0}
        return [even, alone, nothing]


def test_times_are_per_call_and_imbalance_is_over_the_mean():
    pool = Pool()
    down, other = phase_times(lambda: 1, pool, 0.0)
    assert pool.profiling == [True, False]
    assert (down["phase"], down["tasks_per_call"], down["ms_per_call"]) == ("down", 6, 10)
    assert (down["open_ms_per_call"], down["imbalance"]) == (2, 1)
    assert (other["phase"], other["imbalance"]) == ("other", 4)
