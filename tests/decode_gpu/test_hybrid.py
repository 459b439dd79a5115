"""Hybrid decode on torch's CPU device: against transformers, CPU decode, and itself."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from oracles import MINI, ORACLE_NAMES, expected, oracle_folder

from moechat import SamplingParams

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")
from hybrid_engine import with_hybrid  # noqa: E402

MARGIN = 0.25
TOKENS = 24


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def want(name: str) -> dict[str, np.ndarray]:
    return expected(oracle_folder(name))


def greedy(session, ids, max_tokens=TOKENS):
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_end=True)
    return [e.token_id for e in session.generate(ids, params) if e.token_id is not None]


@pytest.mark.parametrize("name", ORACLE_NAMES)
def test_exact_mode_gives_the_tokens_of_transformers(open_engine, name):
    folder = oracle_folder(name)
    engine = open_engine(folder, compute="exact")
    with_hybrid(engine, folder)
    for prompt in range(3):
        session = engine.session()
        tokens = greedy(session, want(name)[f"prompt_{prompt}_ids"].tolist())
        assert tokens == want(name)[f"prompt_{prompt}_greedy"].tolist()
