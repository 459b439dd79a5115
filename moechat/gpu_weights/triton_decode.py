"""FP8 blocks to BF16 or float32 in one pass over memory: the same bits as decode.py, sooner.

Imports triton, which comes with torch for CUDA; decode.py does without where it is missing.
"""

from __future__ import annotations

from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

_TILE_ROWS, _TILE_COLS = 32, 128


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _decode_tile(  # type: ignore[no-untyped-def]
    codes,
    scales,
    out,
    rows,
    cols,
    grid_rows,
    grid_cols,
    block_rows,
    block_cols,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
):
    expert = tl.program_id(2).to(tl.int64)
    first_row = tl.program_id(1) * TILE_ROWS
    first_col = tl.program_id(0) * TILE_COLS
    # A tile lies in one block of scales.
    block = (first_row // block_rows) * grid_cols + first_col // block_cols
    scale = tl.load(scales + expert * grid_rows * grid_cols + block)
    row = first_row + tl.arange(0, TILE_ROWS)[:, None]
    col = first_col + tl.arange(0, TILE_COLS)[None, :]
    inside = (row < rows) & (col < cols)
    place = (expert * rows + row) * cols + col  # of 64 bits from the expert on
    code = tl.load(codes + place, mask=inside, other=0).to(tl.int16)
    # Exponent and mantissa stand where float16 has them, which is 2^-8 of the value: the biases are
    # 7 and 15. Its subnormals are e4m3's.
    half = ((code & 0x7F) << 7) | ((code & 0x80) << 8)
    value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    value = tl.where((code & 0x7F) == 0x7F, float("nan"), value)
    tl.store(out + place, (value * scale).to(out.dtype.element_ty), mask=inside)


def fits(block: tuple[int, int], rows: int, cols: int) -> bool:
    """Whether tiles of a matrix lie in one block of its scales each."""
    return (block[0] % _TILE_ROWS == 0 or block[0] >= rows) and (
        block[1] % _TILE_COLS == 0 or block[1] >= cols
    )


def decode_fp8(
    codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], out: torch.Tensor
) -> None:
    """``out`` [E, rows, cols] of uint8 codes [E, rows, cols] and float32 scales [E, grid].

    All dense, on one CUDA device.
    """
    experts, rows, cols = out.shape
    tiles = (-(-cols // _TILE_COLS), -(-rows // _TILE_ROWS), experts)
    device: Any = torch.cuda.device_of  # it has no types
    with device(out):
        _decode_tile[tiles](
            codes, scale, out, rows, cols, scale.shape[1], scale.shape[2], *block,
            TILE_ROWS=_TILE_ROWS, TILE_COLS=_TILE_COLS,
        )  # fmt: skip
