"""Fixtures of hybrid decode on torch's CPU device."""

import pytest
from oracles import SMALL_ORACLE, oracle_folder


@pytest.fixture
def engine(open_engine):
    """Of the small oracle, its decode steps on torch's CPU device."""
    from hybrid_engine import with_hybrid  # imports torch

    folder = oracle_folder(SMALL_ORACLE)
    engine = open_engine(folder)
    with_hybrid(engine, folder)
    return engine
