"""The kernels of triton without a GPU: in its interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreter_process import interpret_tests

pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")
pytest.importorskip("triton", reason="triton is not installed: it comes with torch for CUDA")


def test_kernels_in_the_interpreter() -> None:
    interpret_tests(str(Path(__file__).with_name("interpreted_kernels.py")))
