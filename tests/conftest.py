"""Shared fixtures: the oracle folders, mini, and engines that are closed when a test ends."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from oracles import ORACLE_NAMES, PIPELINE_ORACLES, SMALL_ORACLE, oracle_folder

from moechat.engine.engine import Engine


@pytest.fixture(scope="session", autouse=True)
def away_from_the_source(tmp_path_factory: pytest.TempPathFactory) -> None:
    """`python -m moechat` started by a test must find the installed package, not this checkout."""
    os.chdir(tmp_path_factory.mktemp("cwd"))


@pytest.fixture(params=ORACLE_NAMES)
def oracle(request: pytest.FixtureRequest) -> Path:
    return oracle_folder(request.param)


@pytest.fixture(params=PIPELINE_ORACLES)
def pipeline_oracle(request: pytest.FixtureRequest) -> Path:
    return oracle_folder(request.param)


@pytest.fixture
def small_oracle() -> Path:
    return oracle_folder(SMALL_ORACLE)


@pytest.fixture
def open_engine() -> Iterator[Callable[..., Engine]]:
    """Engine constructor; every engine is closed at the end, also after a failure."""
    engines: list[Engine] = []

    def open_(folder: Path, **settings: Any) -> Engine:
        settings.setdefault("threads", 2)
        engine = Engine(folder, **settings)
        engines.append(engine)
        return engine

    yield open_
    for engine in engines:
        engine.close()


@pytest.fixture
def open_streamed(open_engine: Callable[..., Engine]) -> Callable[..., Engine]:
    """The same, with prompts read by streamed prefill, on torch's CPU device."""

    def open_(folder: Path, **settings: Any) -> Engine:
        return open_engine(folder, **{"device": "torch-cpu", "gpu_prefill_tokens": 0} | settings)

    return open_


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """Beside the engine's threads several of torch's own make everything slower."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
