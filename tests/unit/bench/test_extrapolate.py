"""From cuts to the whole: arithmetic of the fit."""

from __future__ import annotations

import pytest
from tiny_shapes import real

from moechat.bench.bursts import Burst, Reading, Work
from moechat.bench.doubts import disagreeing_parts
from moechat.bench.synthetic.extrapolate import at_one_speed, extrapolate, solve
from moechat.bench.synthetic.measure import counts_of, part_shapes

TRUE = {"outside_layers": 0.002, "head": 0.04, "dense_layer": 0.015, "moe_layer": 0.012}


def seconds(counts, true=TRUE, factor=1.0):
    return factor * sum(number * true[part] for part, number in counts.items())


def v3(moe_layers=1):
    built = real("deepseek-v3").cut(dense_layers=2, moe_layers=moe_layers, experts=16)
    return [counts_of(shape, built.vocab) for shape in part_shapes(built)]


def test_parts_and_whole_are_recovered_exactly_without_noise():
    counts = v3()
    assert solve(counts, list(map(seconds, counts))) == pytest.approx(TRUE)
    whole = counts_of(real("deepseek-v3"), 129280)
    assert whole == {"outside_layers": 1, "head": 1, "dense_layer": 3, "moe_layer": 58}
    fit = extrapolate(counts, [list(map(seconds, counts))], whole)
    # 2 ms + 40 ms + 3 x 15 ms + 58 x 12 ms by hand.
    assert fit.whole.median == pytest.approx(0.783)
    assert fit.whole.min == pytest.approx(0.783) == fit.whole.max


def test_models_without_dense_layers_too():
    built = real("gpt-oss-20b").cut(moe_layers=4)
    shapes = part_shapes(built)
    assert [shape.moe_layers for shape in shapes] == [2, 4, 4]
    counts = [counts_of(shape, built.vocab) for shape in shapes]
    true = {"outside_layers": 0.001, "head": 0.02, "moe_layer": 0.003}
    assert solve(counts, [seconds(one, true) for one in counts]) == pytest.approx(true)


def test_a_cut_head_is_extrapolated_too():
    built = real("deepseek-v3").cut(dense_layers=2, moe_layers=1, vocab=12928)
    counts = [counts_of(shape, built.vocab) for shape in part_shapes(built)]
    whole = counts_of(real("deepseek-v3"), built.vocab)
    assert whole["head"] == 10
    fit = extrapolate(counts, [list(map(seconds, counts))], whole)
    assert fit.whole.median == pytest.approx(0.002 + 10 * 0.04 + 3 * 0.015 + 58 * 0.012)


def test_medians_ignore_one_disturbed_round_and_the_range_shows_it():
    counts = v3()
    quiet = list(map(seconds, counts))
    disturbed = [*quiet[:-2], quiet[-2] + 0.5, quiet[-1] + 0.5]
    fit = extrapolate(counts, [quiet, disturbed, quiet], TRUE.fromkeys(TRUE, 1))
    assert fit.parts["moe_layer"].median == pytest.approx(0.012)
    assert fit.parts["moe_layer"].max > 0.4


def report(heads, layers, head_phase=None):
    phases = [{"phase": "head", "ms_per_token": head_phase}] if head_phase else []
    return {
        "decode": [{"phases": phases} for _ in heads],
        "whole": {
            "dense_layers": 0,
            "moe_layers": 10,
            "decode": [
                {
                    "measured": {
                        "outside_layers_seconds_per_token_median": 0.0001 * i,
                        "head_seconds_per_token_median": head,
                        "moe_layer_seconds_per_token_median": layer,
                    },
                    "extrapolated": {"seconds_per_token_median": head + 10 * layer},
                }
                for i, (head, layer) in enumerate(zip(heads, layers))
            ],
        },
    }


@pytest.mark.parametrize(
    ("heads", "layers", "head_phase", "words"),
    [
        ((0.1, 0.12), (0.05, 0.09), 90, []),  # attention grows with the context
        ((0.1, 0.2), (0.05, 0.05), None, ["head takes 100, 200 ms"]),
        ((0.1, 0.1), (0.09, 0.05), None, ["moe layer takes 90, 50 ms"]),
        ((0.298, 0.298), (0.05, 0.05), 175, ["head takes 298, 175 ms by differences"]),
        ((0.001, 0.003), (0.05, 0.05), None, []),  # too small to matter
    ],
)
def test_parts_that_contradict_each_other_are_told(heads, layers, head_phase, words):
    warnings = disagreeing_parts(report(heads, layers, head_phase))
    assert len(warnings) == len(words)
    for warning, part in zip(warnings, words):
        assert part in warning


def test_nothing_takes_less_than_no_time():
    counts = v3()
    noisy = [took * factor for took, factor in zip(map(seconds, counts), (1.3, 1, 0.7, 1.1))]
    found = solve(counts, noisy)
    assert min(found.values()) == 0 and sum(found.values()) > 0


def test_models_that_are_alike_are_an_error():
    with pytest.raises(ValueError):
        solve([{"a": 1, "b": 1}, {"a": 2, "b": 2}], [1, 2])


def test_memory_that_changes_speed_is_taken_out():
    counts = v3()
    quiet = list(map(seconds, counts))

    def burst(took, read):
        reading = Reading(read, 0, 1, 1)
        return Burst(0, Work(1, took, took, 1), reading, reading)

    # Memory is half as fast in the first of three rounds.
    parts = [[burst(2 * took, 20e9), burst(took, 40e9), burst(took, 40e9)] for took in quiet]
    rounds = at_one_speed(parts)
    assert len(rounds) == 3
    for row in rounds:
        assert row == pytest.approx(quiet)
