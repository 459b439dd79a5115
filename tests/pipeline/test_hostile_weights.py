"""A damaged checkpoint that loads must end a request with a named error, never with wrong text."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from moechat import SamplingParams
from moechat.errors import NonFiniteLogits
from moechat.weights.mapped import Checkpoint


@pytest.fixture
def poisoned(small_oracle, tmp_path):
    """A copy whose layer 1 output projection holds one FP8 NaN code."""
    folder = tmp_path / "poisoned"
    shutil.copytree(small_oracle, folder)
    stored = Checkpoint.open(folder).tensors["model.layers.1.self_attn.o_proj.weight"]
    with stored.file.open("r+b") as file:
        file.seek(stored.begin_byte)
        file.write(bytes([0x7F]))
    return folder


@pytest.mark.parametrize("compute", ["bf16", "exact"])
def test_nan_codes_name_the_first_bad_layer(poisoned, open_engine, compute):
    engine = open_engine(poisoned, compute=compute)
    for ids in ([5], [5, 6, 7]):  # through decode alone, and through prefill
        session = engine.session()
        with pytest.raises(NonFiniteLogits, match=r"model\.layers\.1"):
            list(session.generate(ids, SamplingParams(temperature=0)))
        with pytest.raises(NonFiniteLogits, match=r"model\.layers\.1"):
            engine.session().extend(ids)


def test_the_engine_survives(poisoned, small_oracle, open_engine):
    engine = open_engine(poisoned)
    session = engine.session()
    with pytest.raises(NonFiniteLogits):
        session.extend([1, 2, 3])
    assert len(session) == 0
    assert len(session.cache) == 0
    good = open_engine(small_oracle)
    assert np.isfinite(good.session().extend([1, 2, 3])).all()
