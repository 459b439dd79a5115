"""mini against transformers' greedy answers in float32 (expected.json, expected_logits.npz)."""

from __future__ import annotations

import json

import numpy as np
import pytest
from oracles import MINI

from moechat import SamplingParams
from moechat.messages import Turn

ENTRIES = json.loads((MINI / "expected.json").read_text())
BF16_MARGIN = 0.1


def greedy(engine, ids, count):
    params = SamplingParams(temperature=0, max_tokens=count)
    events = engine.session().generate(ids, params)
    return [event.token_id for event in events if event.token_id is not None]


@pytest.mark.parametrize("compute", ["exact", "bf16"])
def test_greedy_answers(open_engine, compute):
    engine = open_engine(MINI, compute=compute)
    compared = 0
    for entry in ENTRIES:
        if compute == "bf16" and entry["min_margin"] < BF16_MARGIN:
            continue
        count = entry["compare_tokens"]
        assert greedy(engine, entry["ids"], count) == entry["greedy"][:count], entry["text"]
        compared += 1
    assert compared == (len(ENTRIES) if compute == "exact" else 10)


def test_logits_in_exact_mode(open_engine):
    engine = open_engine(MINI, compute="exact")
    for name, want in np.load(MINI / "expected_logits.npz").items():
        ids = ENTRIES[int(name.split("_")[0][1:])]["ids"]
        assert np.abs(engine.session().extend(ids, logits="last")[0] - want).max() <= 1e-3


def test_prompts_are_rendered_as_expected(open_engine):
    engine = open_engine(MINI)
    for entry in ENTRIES:
        pairs = entry.get("turns", [[entry.get("user"), None]])
        turns = [
            turn
            for user, reply in pairs
            for turn in (Turn("user", user), *([Turn("assistant", reply)] if reply else []))
        ]
        assert engine.text.template.encode(turns) == entry["ids"]
