"""FP8 GEMV by instruction set, against plain reading of the same bytes: see ``gemv``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from moechat import _native

ROWS, COLS = 2048, 7168  # gate or up of one DeepSeek-V3 expert
ROTATION_BYTES = 1_300_000_000  # well beyond any last-level cache, so every byte comes from DRAM
ROUNDS = 7
BURST_SECONDS = 0.12
PLAIN = "plain reading"


def gemv() -> None:
    """Print GB/s of weight bytes on one thread, from DRAM; and ratios to plain reading.

    The contestants take turns in short bursts, so that a machine whose speed wanders is fair to
    all; ratios are taken within a round, and medians over the rounds.
    """
    matrix_bytes = ROWS * COLS
    count = ROTATION_BYTES // matrix_bytes + 1
    # Bytes of one random matrix, moved along: distinct pages, quickly made, and no NaN codes.
    generator = np.random.default_rng(1)
    codes = generator.integers(0x20, 0x50, (ROWS, COLS), np.uint8)
    weights = np.empty((count, ROWS, COLS), np.uint8)
    weights[:] = codes
    scale = np.full((ROWS // 128, COLS // 128), 1e-3, np.float32)
    views = [_native.MatrixView("fp8_block", weight, scale) for weight in weights]
    x = generator.standard_normal((1, COLS)).astype(np.float32)
    out = np.empty((1, ROWS), np.float32)
    before = _native.active_instruction_set()
    position = 0

    def rate(run: Callable[[int], object]) -> float:
        nonlocal position
        done, began = 0, time.perf_counter()
        while (seconds := time.perf_counter() - began) < BURST_SECONDS or done == 0:
            run(position)
            position = (position + 1) % count
            done += 1
        return done * matrix_bytes / seconds / 1e9

    def multiply(index: int) -> None:
        _native.gemv(views[index], x, "bf16", 0, ROWS, out)

    def read(index: int) -> None:
        _native.read_checksum(weights[index], 0, matrix_bytes)

    names = [PLAIN, *reversed(_native.supported_instruction_sets())]
    rates: dict[str, list[float]] = {name: [] for name in names}
    try:
        for _ in range(ROUNDS):
            for name in names:
                if name != PLAIN:
                    _native.force_instruction_set(name)
                rates[name].append(rate(read if name == PLAIN else multiply))
    finally:
        _native.force_instruction_set(before)

    gigabytes = count * matrix_bytes / 1e9
    print(f"FP8 GEMV {ROWS} x {COLS}, one thread, {count} matrices of {gigabytes:.2f} GB in turn")
    print(f"{'':14}{'GB/s':>8}{'min':>8}{'max':>8}{'/ plain':>9}{'/ ref':>8}")
    for name in names:
        values = rates[name]
        to_plain = statistics.median(a / b for a, b in zip(values, rates[PLAIN], strict=True))
        to_ref = statistics.median(a / b for a, b in zip(values, rates["ref"], strict=True))
        print(
            f"{name:14}{statistics.median(values):8.2f}{min(values):8.2f}{max(values):8.2f}"
            f"{to_plain:9.3f}{to_ref:8.1f}"
        )


if __name__ == "__main__":
    gemv()
