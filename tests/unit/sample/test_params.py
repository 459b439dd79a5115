"""Validation of SamplingParams: every error names parameter, value and range."""

from __future__ import annotations

import dataclasses
import math

import pytest

from moechat.errors import BadParameter
from moechat.sample.params import SamplingParams


def test_defaults_are_neutral():
    assert dataclasses.asdict(SamplingParams()) == {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "seed": None,
        "stop": (),
        "max_tokens": None,
        "ignore_end": False,
    }


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("temperature", -0.1, "0 or more"),
        ("temperature", math.nan, "0 or more"),
        ("temperature", math.inf, "0 or more"),
        ("temperature", "1", "0 or more"),
        ("temperature", True, "0 or more"),
        ("temperature", 10**400, "0 or more"),
        ("top_k", -1, "0 (off) or more"),
        ("top_k", 2.0, "0 (off) or more"),
        ("top_k", 2**31, "0 (off) or more"),
        ("top_p", 0, "above 0, at most 1"),
        ("top_p", 1.01, "above 0, at most 1"),
        ("top_p", math.nan, "above 0, at most 1"),
        ("min_p", -0.01, "0 to 1"),
        ("min_p", 1.01, "0 to 1"),
        ("repetition_penalty", 0, "above 0"),
        ("presence_penalty", math.nan, "a finite number"),
        ("presence_penalty", math.inf, "a finite number"),
        ("seed", -1, "0 to 2^64-1"),
        ("seed", 2**64, "0 to 2^64-1"),
        ("seed", 1.0, "0 to 2^64-1"),
        ("max_tokens", 0, "1 or more"),
        ("max_tokens", True, "1 or more"),
        ("stop", ("",), "non-empty strings"),
        ("stop", "", "non-empty strings"),
        ("stop", ("a", 1), "non-empty strings"),
        ("stop", 5, "non-empty strings"),
        ("stop", None, "non-empty strings"),
        ("ignore_end", 1, "true or false"),
    ],
)
def test_out_of_range(name, value, allowed):
    with pytest.raises(BadParameter) as caught:
        SamplingParams(**{name: value})
    assert isinstance(caught.value, ValueError)
    for part in (name, repr(value), allowed):
        assert part in caught.value.message


def test_edges_are_allowed():
    SamplingParams(temperature=0, top_k=2**31 - 1, top_p=1, min_p=1, seed=2**64 - 1, max_tokens=1)
    SamplingParams(min_p=0, seed=0, presence_penalty=-2.0, repetition_penalty=0.5, top_p=1e-9)


def test_stop_is_a_tuple():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 2.0
