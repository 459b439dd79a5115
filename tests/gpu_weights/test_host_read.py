"""Tests of gpu_weights/host_read.py, on torch's CPU device and in Triton's interpreter."""

from pathlib import Path

import pytest
import torch
from interpreter_process import interpret_tests

from moechat.gpu_weights.host_read import from_host


def test_copies() -> None:
    source = torch.arange(12.0).view(3, 4)
    out = torch.zeros(3, 4)
    from_host(out, source)
    assert torch.equal(out, source)
    from_host(out[:0], source[:0])


@pytest.mark.parametrize("out", [torch.zeros(3), torch.zeros(4, 3).t(), torch.zeros(12).short()])
def test_refuses_other_bytes(out: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="the same bytes"):
        from_host(out, torch.arange(12.0).view(3, 4))


def test_kernel_in_the_interpreter() -> None:
    interpret_tests(str(Path(__file__).with_name("interpreted_host_read.py")))
