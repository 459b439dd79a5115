"""A model whose multi-token-prediction layer is often right, made from an oracle folder.

The oracle's own layer is random, so its drafts never hit. Here every branch of the main model is
small beside the residual stream, so the next token depends on the last one above all, and the draft
layer hands the embedding of the last token through to the main head: its drafts are right more
often than not, and wrong often enough.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from oracle_formats import Stored, write_safetensors
from oracle_variants import float_tensors
from oracles import ORACLES, SMALL_ORACLE, scratch_folder

Tensors = dict[str, Stored]
DRAFT = "model.layers.2."
_BRANCH_SCALE = 0.03


@functools.cache
def agreeing_folder() -> Path:
    """F32. The draft layer has no embedding and no head of its own."""
    return write_folder("agreeing", lambda tensors: None)


def write_folder(label: str, change: Callable[[Tensors], None]) -> Path:
    """The agreeing model in a new folder, after ``change`` to its tensors."""
    tensors = _agreeing_tensors()
    change(tensors)
    folder = scratch_folder() / label
    folder.mkdir()
    config = json.loads((ORACLES / SMALL_ORACLE / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}) + "\n")
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def _agreeing_tensors() -> Tensors:
    values = {name: tensor.array for name, tensor in float_tensors(SMALL_ORACLE).items()}
    for name in values:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            values[name] = values[name] * np.float32(_BRANCH_SCALE)
    hidden = len(values["model.norm.weight"])
    values[DRAFT + "enorm.weight"] = np.ones(hidden, np.float32)
    values[DRAFT + "eh_proj.weight"] = np.eye(hidden, 2 * hidden, dtype=np.float32)
    values[DRAFT + "shared_head.norm.weight"] = values["model.norm.weight"]
    del values[DRAFT + "embed_tokens.weight"], values[DRAFT + "shared_head.head.weight"]
    return {name: Stored("F32", array) for name, array in values.items()}
