"""Shared fixtures: the oracle folders, mini, and engines that are closed when a test ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moechat
from moechat.engine.engine import Engine

ORACLES = Path(__file__).parent / "fixtures" / "oracle"
ORACLE_NAMES = ("deepseek_v3_bf16", "deepseek_v3_fp8_256", "deepseek_v3_fp8_odd")
MINI = Path(moechat.__file__).parent / "data" / "mini"


@pytest.fixture(params=ORACLE_NAMES)
def oracle(request: pytest.FixtureRequest) -> Path:
    return ORACLES / request.param


@pytest.fixture
def small_oracle() -> Path:
    return ORACLES / "deepseek_v3_fp8_odd"


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


def expected(folder: Path) -> dict[str, np.ndarray]:
    return dict(np.load(folder / "expected.npz"))


def meta(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "meta.json").read_text())
