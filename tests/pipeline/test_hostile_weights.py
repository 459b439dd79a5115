"""A damaged checkpoint that loads must end a request with a named error, never with wrong text."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from oracles import oracle_folder

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


BAD_TOKEN = 7


@pytest.fixture
def bad_token(tmp_path):
    """A copy of a model whose embedding of BAD_TOKEN begins with NaN."""
    folder = tmp_path / "bad token"
    shutil.copytree(oracle_folder("llama"), folder)
    stored = Checkpoint.open(folder).tensors["model.embed_tokens.weight"]
    with stored.file.open("r+b") as file:
        file.seek(stored.begin_byte + BAD_TOKEN * 2 * stored.shape[1])
        file.write(np.uint16(0x7FC0).tobytes())
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


def test_one_answer_that_fails_ends_no_other(bad_token, open_engine):
    engine = open_engine(bad_token)
    sampling = SamplingParams(temperature=0, max_tokens=200, ignore_end=True)

    def tokens_of(events):
        return [event.token_id for event in events if event.token_id is not None]

    alone = tokens_of(engine.session().generate([5, 6], sampling))
    assert BAD_TOKEN not in alone
    for _ in range(5):
        good = engine.session().generate([5, 6], sampling)
        first = next(event for event in good if event.token_id is not None)
        bad = [engine.session().generate([BAD_TOKEN], sampling) for _ in range(2)]
        assert [first.token_id, *tokens_of(good)] == alone
        assert good.result().finish_reason == "length"
        for handle in bad:
            with pytest.raises(NonFiniteLogits, match=r"model\.layers\.0"):
                handle.result()
