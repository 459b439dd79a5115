"""The kernel of host_read, interpreted; test_host_read.py runs this file."""

import pytest
import torch
import triton_interpreter  # noqa: F401  # before any kernel

from moechat.gpu_weights import triton_host_read


@pytest.mark.parametrize("size_bytes", [1, 2, 7, 8, 4100, 8192, 8200, 16394])
@pytest.mark.parametrize("offset", [0, 1, 2, 4])
def test_any_bytes(size_bytes: int, offset: int) -> None:
    random = torch.Generator().manual_seed(size_bytes)
    source = torch.randint(0, 256, (size_bytes + offset,), dtype=torch.uint8, generator=random)
    out = torch.full((size_bytes + offset + 16,), 255, dtype=torch.uint8)
    triton_host_read.read(out[offset : offset + size_bytes], source[offset:])
    assert torch.equal(out[offset : offset + size_bytes], source[offset:])
    assert bool((out[offset + size_bytes :] == 255).all())
