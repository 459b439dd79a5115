"""Triton's kernels are made for the interpreter or for a GPU when they are defined: tests that want
the interpreter run in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys


def interpret(*arguments: str) -> str:
    """What ``python arguments`` printed, with this process's modules.

    AssertionError if it fails.
    """
    environment = {
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    result = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    return result.stdout


def interpret_tests(path: str) -> None:
    """Run a file of tests so."""
    interpret("-m", "pytest", "-q", "-p", "no:cacheprovider", path)
