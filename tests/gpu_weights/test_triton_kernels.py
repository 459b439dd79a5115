"""The kernels of triton without a GPU: in its interpreter, which wants a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")
pytest.importorskip("triton", reason="triton is not installed: it comes with torch for CUDA")


def test_kernels_in_the_interpreter() -> None:
    file = Path(__file__).parent / "interpreted_kernels.py"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)],
        capture_output=True,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
