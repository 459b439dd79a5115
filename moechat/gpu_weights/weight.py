"""A matrix on a device: decoded, or FP8 codes with the scales of their blocks as they are stored.

Shapes: E experts, N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch  # type: ignore[import-not-found, unused-ignore]


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Matrix:
    """Codes of e4m3, uint8 [N, K] or [E, N, K]; a weight is float32(code) * its block's scale.

    ``scale``: float32 [grid rows, grid columns], or with E before them, one a ``block`` (rows,
    columns). ``first_row``: where in its blocks' rows the first row stands: a head's rows may begin
    amidst a block. ``quantised_inputs``: it is multiplied with inputs as inputs.py makes them,
    where it can be. All dense, on one device.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    block: tuple[int, int]
    first_row: int = 0
    quantised_inputs: bool = False

    @property
    def shape(self) -> torch.Size:
        """Of the codes."""
        return self.codes.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the inputs that it is multiplied with."""
        return torch.bfloat16

    @property
    def device(self) -> torch.device:
        """Where codes and scales are."""
        return self.codes.device

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, expert: int) -> Fp8Matrix:
        """One matrix [N, K] of a stack [E, N, K]."""
        return replace(self, codes=self.codes[expert], scale=self.scale[expert])

    def rows(self, rows: slice) -> Fp8Matrix:
        """Consecutive rows of a matrix [N, K], as a view."""
        first_row = self.first_row + rows.start
        whole = first_row // self.block[0]
        return replace(
            self,
            codes=self.codes[rows],
            scale=self.scale[whole:],
            first_row=first_row - whole * self.block[0],
        )

    def to_dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Decoded, float32 or rounded once more to bfloat16."""
        out = self.codes.view(torch.float8_e4m3fn).to(dtype)
        scale_blocks(out, self.scale, self.block, self.first_row)
        return out


Weight: TypeAlias = "torch.Tensor | Fp8Matrix"


def rows_of(weight_NK: Weight, rows: slice) -> Weight:
    """Consecutive rows of a matrix, as a view."""
    return weight_NK.rows(rows) if isinstance(weight_NK, Fp8Matrix) else weight_NK[rows]


def scale_blocks(
    codes: torch.Tensor, grid: torch.Tensor, block: tuple[int, int], first_row: int = 0
) -> None:
    """Multiply ``codes`` [..., N, K] in place by the scales of their blocks, in float32.

    ``grid`` [..., grid rows, grid columns]; row n has the scales of grid row
    (first_row + n) // block rows.
    """
    rows, cols = codes.shape[-2:]
    block_cols = min(block[1], cols)
    if block[0] > 1:
        number = torch.arange(first_row, first_row + rows, device=grid.device) // block[0]
        grid = grid.index_select(-2, number)
    whole = cols // block_cols
    tiles = codes[..., : whole * block_cols]
    tiles = tiles.view(*tiles.shape[:-1], whole, block_cols)
    torch.mul(tiles, grid[..., :rows, :whole, None], out=tiles)
    if whole * block_cols < cols:  # the last, ragged block of columns
        rest = codes[..., whole * block_cols :]
        torch.mul(rest, grid[..., :rows, whole:], out=rest)
