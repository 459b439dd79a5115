"""Models that tests compute with: oracle folders (expected outputs by transformers), and mini."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from oracle_weights import remake_folder

import moechat

ORACLES = Path(__file__).parent / "fixtures" / "oracle"
ORACLE_NAMES = tuple(sorted(path.parent.name for path in ORACLES.glob("*/manifest.json")))
SMALL_ORACLE = "deepseek_v3_fp8_odd"
# For properties of the pipeline, whatever the model: latent attention; grouped attention with a
# window in all, in most (of two rope bases) and in every other layer (with sinks, MXFP4 experts).
PIPELINE_ORACLES = (SMALL_ORACLE, "mistral_swa", "gemma3_text", "gpt_oss_mxfp4")
MINI = Path(moechat.__file__).parent / "data" / "mini"


@functools.cache
def oracle_folder(name: str) -> Path:
    """The complete model folder, made at its first use; shared by all tests, so never changed."""
    return remake_folder(ORACLES / name, scratch_folder() / name)


@functools.cache
def scratch_folder() -> Path:
    """A temporary folder of this process, usable while tests are collected; removed at exit."""
    folder = Path(tempfile.mkdtemp(prefix="moechat-oracles-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def expected(folder: Path) -> dict[str, np.ndarray]:
    """What transformers computed in float32, of prompts of 1, 17 and 96 ids (P = 0, 1, 2).

    prompt_P_ids, _last_logits [V], _greedy [24], _greedy_margin [24]; of prompt 1 all_logits
    [17, V], greedy_logits [24, V], hidden [layers + 1, 17, D] (row 0 enters layer 0), final_norm
    [17, D] and, where there are experts, moe_layers [M], router_ids and router_weights [M, 17, K],
    router_logits [M, 17, E].
    """
    return dict(np.load(folder / "expected.npz"))


def meta(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "meta.json").read_text())
