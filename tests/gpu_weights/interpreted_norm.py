"""Norms by a kernel, interpreted; test_triton_norm.py runs this file."""

from __future__ import annotations

import pytest
import torch
import triton_interpreter  # noqa: F401  # before any kernel

from moechat.gpu_weights.products import rms_norm
from moechat.gpu_weights.triton_norm import norm


@pytest.mark.parametrize("width,span", [(200, 200), (192, 64), (7, 7), (1030, 515)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_spans_of_rows(width: int, span: int, dtype: torch.dtype) -> None:
    make = torch.Generator().manual_seed(width)
    x = torch.randn((5, width + 3), generator=make)[:, :width] * 7  # rows with room between
    weight = torch.randn(span, generator=make)
    x[3, 0] = torch.nan
    found, expected = norm(x, weight, 1e-6, dtype), rms_norm(x, weight, 1e-6, torch.float32)
    assert found.dtype == dtype and found.is_contiguous()
    assert torch.equal(found.isnan(), expected.isnan())
    bound = 2e-6 if dtype == torch.float32 else 2**-8
    assert torch.allclose(found.float(), expected, rtol=bound, atol=1e-7, equal_nan=True)


def test_a_rows_bits_do_not_depend_on_the_others() -> None:
    x, weight = torch.randn(6, 300), torch.randn(300)
    whole = norm(x, weight, 1e-5, torch.float32)
    assert all(
        torch.equal(norm(x[r : r + 1], weight, 1e-5, torch.float32)[0], whole[r]) for r in range(6)
    )
    assert norm(x[:0], weight, 1e-5, torch.float32).shape == (0, 300)
