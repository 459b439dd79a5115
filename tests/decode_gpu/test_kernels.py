"""Decode's kernels without a GPU: interpreted_kernels.py in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import moechat

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs Triton")


def test_kernels_in_the_interpreter() -> None:
    folder = Path(__file__).parent
    paths = [str(folder), str(Path(moechat.__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", str(folder / "interpreted_kernels.py")],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)},
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
