"""Sampling values with origins."""

from __future__ import annotations

import pytest

from moechat.errors import BadParameter
from moechat.sample.params import SamplingParams
from moechat.terminal.settings import Settings


def test_flags_win_over_the_model_and_typed_values_over_both():
    settings = Settings(
        SamplingParams(temperature=0.6, top_p=0.95),
        {"temperature": 0.0, "stop": ["x"], "seed": None},
    )
    settings.set_text("Max-Tokens", "5")
    assert settings.params() == SamplingParams(
        temperature=0.0, top_p=0.95, stop=("x",), max_tokens=5
    )
    origins = {name: origin for name, _, origin in settings.describe()}
    assert origins["temperature"] == "flag"
    assert origins["stop"] == "flag"
    assert origins["top_p"] == "model"
    assert origins["max_tokens"] == "set"
    assert origins["seed"] == "default"
    assert "ignore_end" not in origins


def test_none_takes_a_value_away():
    settings = Settings(flags={"seed": 4, "stop": ["x"]})
    settings.set_text("seed", "none")
    settings.set_text("stop", "none")
    assert settings.params() == SamplingParams()


@pytest.mark.parametrize(
    ("name", "text"),
    [("top_k", "1.5"), ("temperature", "x"), ("temperature", "-1"), ("ignore_end", "1")],
)
def test_a_refused_value_changes_nothing(name, text):
    settings = Settings()
    before = settings.describe()
    with pytest.raises(BadParameter):
        settings.set_text(name, text)
    assert settings.describe() == before


def test_default_gives_back_the_value_at_start():
    settings = Settings(SamplingParams(temperature=0.6), {"top_k": 5})
    for name, value in (("temperature", "0.1"), ("top_k", "9"), ("seed", "4")):
        settings.set_text(name, value)
        settings.set_text(name, "default")
    rows = {name: (value, origin) for name, value, origin in settings.describe()}
    assert rows["temperature"] == ("0.6", "model")
    assert rows["top_k"] == ("5", "flag")
    assert rows["seed"] == ("none", "default")
