"""Checkpoints of names, types and shapes alone: what binding looks at."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

ORACLE = Path(__file__).parents[2] / "fixtures/oracle"
NAMES = sorted(path.parent.name for path in ORACLE.glob("*/manifest.json"))


@dataclass
class FakeTensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    values: np.ndarray | None = None
    file: Path = Path("model.safetensors")

    @property
    def array(self):
        return np.zeros(self.shape, np.int32) if self.values is None else self.values


@dataclass
class FakeCheckpoint:
    tensors: dict[str, FakeTensor] = field(default_factory=dict)

    def add(self, name, dtype, *shape, values=None):
        self.tensors[name] = FakeTensor(name, dtype, shape, values)
        return self


def config_of(name):
    return json.loads((ORACLE / name / "config.json").read_text())


def generation_of(name):
    path = ORACLE / name / "generation_config.json"
    return json.loads(path.read_text()) if path.exists() else {}


def checkpoint_of(name):
    """Every tensor of an oracle folder, by its manifest."""
    files = json.loads((ORACLE / name / "manifest.json").read_text())["files"]
    checkpoint = FakeCheckpoint()
    for tensors in files.values():
        for tensor, (dtype, shape, *_) in tensors.items():
            checkpoint.add(tensor, dtype, *shape)
    return checkpoint
