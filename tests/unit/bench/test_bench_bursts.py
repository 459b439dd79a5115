"""The burst protocol against a scripted clock: order of turns, rates, ratios, regimes."""

from __future__ import annotations

import pytest

from moechat.bench.bursts import Burst, Reading, Spread, Work, regime, repeat, run_rounds


class Clock:
    """Time that only calls and readings move on."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Scripted:
    """A contestant whose call takes ``seconds`` and needs ``bytes``."""

    def __init__(self, name, threads, seconds, bytes_, clock, log):
        self.name, self.threads = name, threads
        self.seconds, self.bytes, self.clock, self.log = seconds, bytes_, clock, log

    def burst(self):
        return repeat(self.call, 0.05, self.clock, self.clock)

    def call(self):
        self.log.append(self.name)
        self.clock.now += self.seconds
        return self.bytes


def test_a_burst_repeats_until_the_time_is_up_and_at_least_once():
    clock = Clock()

    def call():
        clock.now += 0.4
        return 7

    work = repeat(call, 1.0, clock, lambda: 2 * clock())
    assert (work.calls, work.bytes) == (3, 21)
    assert (work.seconds, work.cpu_seconds) == (pytest.approx(1.2), pytest.approx(2.4))
    assert repeat(call, 0.0, clock, clock).calls == 1


def test_rates_and_ratios_are_those_of_each_burst_and_its_neighbours():
    clock, log = Clock(), []
    rates = iter([40e9, 60e9, 80e9])

    def read(threads):
        clock.now += 100  # readings cost time that is nobody's burst
        return Reading(next(rates), 10e9, 25e9, 15e9)

    contestant = Scripted("a", 2, 0.01, 400_000_000, clock, log)
    turns = list(run_rounds([contestant], read, 2))
    assert [index for index, _ in turns] == [0, 0]
    first, second = (burst for _, burst in turns)
    assert (first.round, second.round) == (0, 1)
    assert first.work.calls == len(log) // 2
    assert first.bytes_per_second == pytest.approx(40e9)
    assert first.seconds_per_call == pytest.approx(0.01)
    assert first.work.cpu_seconds == pytest.approx(first.work.seconds)
    assert first.read_bytes_per_second == pytest.approx(50e9)
    assert first.fraction_of_read == pytest.approx(0.8)
    # 10 ms, of which 400 MB at 50 GB/s take 8.
    assert first.fixed_seconds_per_call == pytest.approx(0.002)
    assert first.fraction_of_read_by_cpu_time == pytest.approx(40 / 25)
    assert second.read_bytes_per_second == pytest.approx(70e9)
    assert second.fraction_of_read == pytest.approx(40 / 70)


def test_every_burst_lies_between_readings_with_as_many_threads():
    clock, log = Clock(), []

    def read(threads):
        log.append(f"read {threads}")
        return Reading(1.0, 2.0, 1.0, 1.0)

    contestants = [
        Scripted("a", 2, 1, 1, clock, log),
        Scripted("b", 2, 1, 1, clock, log),
        Scripted("c", 1, 1, 1, clock, log),
    ]
    indices = [index for index, _ in run_rounds(contestants, read, 2)]
    assert indices == [0, 1, 2, 0, 1, 2]
    one_round = ["read 2", "a", "read 2", "b", "read 2", "read 1", "c", "read 1"]
    assert log == one_round * 2


def test_of_two_readings_the_faster_counts():
    assert Reading(3.0, 5.0, 4.0, 2.0).best == 5.0
    assert Reading(6.0, 5.0, 1.0, 2.0).best == 6.0
    assert Reading(3.0, 5.0, 4.0, 2.0).best_cpu == 4.0


def made(before, after):
    return Burst(0, Work(1, 1.0, 1.0, 1), Reading(before, 0, 1, 1), Reading(after, 0, 1, 1))


def test_a_burst_is_fast_when_both_neighbours_are():
    fast, edge, slow = made(66e9, 70e9), made(65e9, 65e9), made(90e9, 64.9e9)
    assert (fast.fast, edge.fast, slow.fast) == (True, True, False)
    assert regime([fast, edge]) == "fast"
    assert regime([slow, slow]) == "slow"
    assert regime([fast, slow]) == "mixed"


def test_spread_is_median_and_range():
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([4.0, 1.0]) == Spread(2.5, 1.0, 4.0)
