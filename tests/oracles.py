"""Models that tests compute with: oracle folders (expected outputs by transformers), and mini."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

import moechat

ORACLES = Path(__file__).parent / "fixtures" / "oracle"
ORACLE_NAMES = ("deepseek_v3_bf16", "deepseek_v3_fp8_256", "deepseek_v3_fp8_odd")
MINI = Path(moechat.__file__).parent / "data" / "mini"


def expected(folder: Path) -> dict[str, np.ndarray]:
    return dict(np.load(folder / "expected.npz"))


def meta(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "meta.json").read_text())
