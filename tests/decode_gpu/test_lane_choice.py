"""Tests of decode/gpu/lane_choice.py."""

import pytest

from moechat.decode.gpu.lane_choice import KEPT_STEPS, TRIAL_STEPS, LaneChoice


def after_trials(choice: LaneChoice, turns_seconds: float, batch_seconds: float) -> list[bool]:
    """What was tried, in pieces of five steps at most."""
    tried = []
    for _ in range(2 * -(-TRIAL_STEPS // 5)):
        turns, steps = choice.next(2)
        steps = min(steps, 5)
        choice.took(2, turns, steps, steps * (turns_seconds if turns else batch_seconds))
        tried.append(turns)
    return tried


@pytest.mark.parametrize(("turns_seconds", "batch_seconds"), [(0.3, 0.34), (0.055, 0.051)])
def test_the_faster_one_is_kept(turns_seconds: float, batch_seconds: float) -> None:
    choice = LaneChoice()
    assert after_trials(choice, turns_seconds, batch_seconds) == [True] * 3 + [False] * 3
    assert choice.next(2) == (turns_seconds < batch_seconds, KEPT_STEPS)


def test_both_are_tried_again_after_a_while() -> None:
    choice = LaneChoice()
    after_trials(choice, 2.0, 1.0)
    turns, steps = choice.next(2)
    choice.took(2, turns, steps - 1, 1.0)
    assert choice.next(2) == (False, 1)
    choice.took(2, turns, 1, 1.0)
    assert choice.next(2) == (True, TRIAL_STEPS)


def test_each_number_of_sessions_has_its_own() -> None:
    choice = LaneChoice()
    after_trials(choice, 2.0, 1.0)
    assert choice.next(3) == (True, TRIAL_STEPS)
    assert choice.next(2) == (False, KEPT_STEPS)


def test_runs_that_were_cut_short_count() -> None:
    choice = LaneChoice()
    for _ in range(TRIAL_STEPS):
        choice.took(2, True, 1, 1.0)
    assert choice.next(2) == (False, TRIAL_STEPS)
