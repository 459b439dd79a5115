"""What ``moechat eval`` can be told, and what is refused."""

from __future__ import annotations

import pytest

from moechat.errors import Usage
from moechat.eval.settings import (
    DEFAULT_LENGTHS,
    NeedleSettings,
    ScoringSettings,
    budget_fractions,
    names_in,
    number,
)


def test_default_lengths_are_those_that_the_context_has_room_for():
    settings = NeedleSettings()
    assert settings.lengths_within(4096) == DEFAULT_LENGTHS
    assert settings.lengths_within(1432) == (700, 1400)
    assert settings.lengths_within(1431) == (700,)
    assert settings.lengths_within(512) == (480,)
    with pytest.raises(Usage, match="context has 100"):
        settings.lengths_within(100)


def test_lengths_that_were_asked_for_must_fit():
    settings = NeedleSettings.from_texts("300, 200", "3", None, "5")
    assert settings.lengths_within(332) == (300, 200)
    with pytest.raises(Usage, match="context has 331"):
        settings.lengths_within(331)


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "99", "²00", "1" * 30])
def test_other_numbers_are_refused(text):
    with pytest.raises(Usage, match="--lengths"):
        NeedleSettings.from_texts(text, "19", None, "0")
    with pytest.raises(Usage, match="--lengths has too many"):
        NeedleSettings.from_texts("700," * 100, "19", None, "0")
    assert number("depths", "0") == 0


@pytest.mark.parametrize("text", ["", "0", "1.01", "-0.5", "nan", "inf", "0.5,", "x", "0.1," * 99])
def test_other_budgets_are_refused(text):
    with pytest.raises(Usage, match="--budgets"):
        budget_fractions(text)


def test_budgets():
    assert budget_fractions("0.5, 1,0.3") == (0.5, 1.0, 0.3)


def test_what_stands_in_a_list_twice_is_refused():
    for call, text in (
        (budget_fractions, "0.5,1,0.50"),
        (names_in, "int8,native, int8"),
        (lambda text: NeedleSettings.from_texts(text, "3", None, "0"), "200, 200"),
    ):
        with pytest.raises(Usage, match="is there twice"):
            call(text)
    assert names_in("int8, native") == ("int8", "native")


def test_the_range_is_told_as_people_write_it():
    with pytest.raises(Usage, match=r"'60': it must be a whole number from 100 to 16,777,216\."):
        number("lengths", "60")
    with pytest.raises(Usage, match="from 1 to 999"):
        NeedleSettings.from_texts(None, "0", None, "0", least_depths=1)
    with pytest.raises(Usage, match="--limit cannot be '0'"):
        number("limit", "0")


def test_something_must_cross_before_what_is_scored():
    with pytest.raises(Usage, match="--scored"):
        ScoringSettings.from_texts(None, "100", "100", "1")
    settings = ScoringSettings.from_texts(None, "2048", "512", "6")
    assert settings.window_within(2048) == 2048
    with pytest.raises(Usage, match="--window"):
        settings.window_within(2047)
