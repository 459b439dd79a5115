"""A FP8 matrix of random codes and scales, as decode's products see one."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Fp8Codes:
    codes: torch.Tensor
    scale: torch.Tensor
    block: tuple[int, int]
    first_row: int = 0

    def to_dense(self, dtype: torch.dtype) -> torch.Tensor:
        values = self.codes.view(torch.float8_e4m3fn).float()
        rows = (torch.arange(len(values), device=values.device) + self.first_row) // self.block[0]
        cols = torch.arange(values.shape[1], device=values.device) // self.block[1]
        return (values * self.scale[rows][:, cols]).to(dtype)

    def rows(self, part: slice) -> Fp8Codes:
        return Fp8Codes(self.codes[part], self.scale, self.block, self.first_row + part.start)


def random_fp8(
    outputs: int, inputs: int, block: tuple[int, int], generator: torch.Generator
) -> Fp8Codes:
    device = generator.device
    codes = torch.randint(
        0, 256, (outputs, inputs), generator=generator, dtype=torch.uint8, device=device
    )
    codes[(codes & 0x7F) == 0x7F] = 0
    codes &= 0xBF  # half of the exponents: values up to 1.9
    grid = (-(-outputs // block[0]), -(-inputs // block[1]))
    scale = torch.rand(grid, generator=generator, device=device) / inputs**0.5 + 1e-4
    return Fp8Codes(codes, scale, block)
