"""A FP8 matrix of random codes and scales."""

from __future__ import annotations

import torch

from moechat.gpu_weights.weight import Fp8Matrix


def random_fp8(
    outputs: int, inputs: int, block: tuple[int, int], generator: torch.Generator
) -> Fp8Matrix:
    device = generator.device
    codes = torch.randint(
        0, 256, (outputs, inputs), generator=generator, dtype=torch.uint8, device=device
    )
    codes[(codes & 0x7F) == 0x7F] = 0
    codes &= 0xBF  # half of the exponents: values up to 1.9
    grid = (-(-outputs // block[0]), -(-inputs // block[1]))
    scale = torch.rand(grid, generator=generator, device=device) / inputs**0.5 + 1e-4
    return Fp8Matrix(codes, scale, block)
