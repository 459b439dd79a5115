"""Matrix shapes of the kernel tests: DeepSeek-V3's cut down, and every awkward edge."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A weight [rows, cols], its place in its parent's scale grid and its layout in memory."""

    name: str
    rows: int
    cols: int
    row_origin: int = 0
    col_origin: int = 0
    block: tuple[int, int] = (128, 128)
    gap: int = 0  # elements between the rows
    offset_bytes: int = 0  # from an aligned address


# Full widths, fewer rows: the contraction is what a kernel gets wrong.
V3_SHAPES = [
    Shape("q_a", 12, 7168),
    Shape("q_b", 48, 1536),
    Shape("kv_a", 9, 7168),
    Shape("kv_b", 256, 512),
    Shape("kv_b_second_head", 64, 512, row_origin=192),
    Shape("o", 5, 16384),
    Shape("down", 33, 2048),
    Shape("router", 16, 7168),
]
RAGGED_SHAPES = [
    Shape(f"{rows}x{cols}", rows, cols)
    for rows, cols in [
        (1, 1), (1, 7), (7, 1), (7, 7), (16, 40), (40, 16), (3, 72), (72, 3), (1, 136), (136, 1),
        (136, 136), (5, 200), (200, 5), (16, 328), (328, 33), (1, 7168), (1100, 40), (2, 129),
    ]
]  # fmt: skip
PLACED_SHAPES = [
    Shape("row_origin", 200, 72, row_origin=100),
    Shape("col_origin", 7, 200, col_origin=57),
    Shape("both_origins", 136, 328, row_origin=127, col_origin=127),
    Shape("origin_within_last_block", 3, 8, row_origin=250, col_origin=120),
    Shape("strided", 16, 200, gap=13),
    Shape("strided_and_unaligned", 17, 136, gap=5, offset_bytes=1, col_origin=3),
    Shape("narrow_blocks", 20, 136, block=(8, 40), row_origin=3, col_origin=9),
    Shape("wide_blocks", 20, 600, block=(16, 256), col_origin=200),
    Shape("blocks_beyond_a_group", 6, 700, block=(128, 129), col_origin=1),
    Shape("one_block_a_row", 5, 300, block=(1, 512)),
]
SHAPES = V3_SHAPES + RAGGED_SHAPES + PLACED_SHAPES
# The layouts that the bitwise tests go through: enough rows to split, edges inside blocks.
BITWISE_SHAPES = [
    Shape("whole_blocks", 64, 512),
    Shape("ragged", 45, 328),
    Shape("placed", 136, 200, row_origin=100, col_origin=57, gap=3, offset_bytes=1),
    Shape("narrow_blocks", 21, 136, block=(8, 40), row_origin=3, col_origin=9),
    Shape("more_rows_than_one_copy", 1100, 72),
]
GEMM_ROWS = [1, 2, 5, 6, 7, 13, 121]
