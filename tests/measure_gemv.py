"""GEMV of one format by instruction set, against plain reading of the same bytes: see ``gemv``."""

from __future__ import annotations

import argparse
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
# Bytes of a row of COLS columns, and where the low byte of a block's float16 scale stands.
GGUF_BLOCKS = {
    "q8_0": (32, 34, [0]), "q4_0": (32, 18, [0]), "q5_0": (32, 22, [0]), "q4_k": (256, 144, [0, 2]),
    "q5_k": (256, 176, [0, 2]), "q6_k": (256, 210, [208]), "mxfp4_block": (32, 17, []),
}  # fmt: skip
FORMATS = ("f32", "f16", "bf16", "fp8", "mxfp4", "int4", "awq", "gptq", *GGUF_BLOCKS)


def stored_bytes(format: str, generator: np.random.Generator) -> np.ndarray:
    """Random uint8 [stored rows, bytes of one]: finite values, no denormals."""
    if format in GGUF_BLOCKS:
        cols, size, scales = GGUF_BLOCKS[format]
        blocks = generator.integers(0, 256, (ROWS, COLS // cols, size), np.uint8)
        for offset in scales:
            blocks[..., offset + 1] = 0x20
        if format == "mxfp4_block":
            blocks[..., 0] = 120
        return blocks.reshape(ROWS, -1)
    if format == "fp8":
        return generator.integers(0x20, 0x50, (ROWS, COLS), np.uint8)
    if format in ("f32", "f16", "bf16"):
        values = generator.standard_normal((ROWS, COLS)).astype(np.float32)
        if format == "f16":
            values = values.astype(np.float16)
        elif format == "bf16":
            values = (values.view(np.uint32) >> 16).astype(np.uint16)
        return values.view(np.uint8)
    shape = {"awq": (COLS, ROWS // 2), "gptq": (COLS // 8, ROWS * 4)}.get(format, (ROWS, COLS // 2))
    return generator.integers(0, 256, shape, np.uint8)


def make_view(format: str, data: np.ndarray) -> _native.MatrixView:
    """A view with scales that all matrices share: they stay in the caches."""
    if format in GGUF_BLOCKS:
        return _native.MatrixView(format, data)
    if format in ("f32", "f16", "bf16"):
        return _native.MatrixView(format, data.view(np.float32 if format == "f32" else np.uint16))
    if format == "fp8":
        return _native.MatrixView(format, data, FP8_SCALE)
    if format == "mxfp4":
        return _native.MatrixView(format, data, E8M0_SCALE, (1, 32))
    if format == "int4":
        codes = data.view(np.int32)
        return _native.MatrixView(format, codes, BF16_SCALE, (1, 32), scale_type="bf16")
    return _native.MatrixView(
        format, data.view(np.int32), F16_SCALE, (128, 1), scale_type="f16", zeros=ZEROS,
        transposed=True,
    )  # fmt: skip


FP8_SCALE = np.full((ROWS // 128, COLS // 128), 1e-3, np.float32)
E8M0_SCALE = np.full((ROWS, COLS // 32), 120, np.uint8)
BF16_SCALE = np.full((ROWS, COLS // 32), 0x3C00, np.uint16)
F16_SCALE = np.full((COLS // 128, ROWS), 0x2000, np.uint16)
ZEROS = np.full((COLS // 128, ROWS // 8), 0x77777777, np.int32)


def gemv(format: str, num_rows: int) -> None:
    """Print GB/s of weight bytes on one thread, from DRAM; and ratios to plain reading.

    The contestants take turns in short bursts, so that a machine whose speed wanders is fair to
    all; ratios are taken within a round, and medians over the rounds.
    """
    generator = np.random.default_rng(1)
    stored = stored_bytes(format, generator)
    matrix_bytes = stored.nbytes
    count = ROTATION_BYTES // matrix_bytes + 1
    # Bytes of one random matrix, moved along: distinct pages, quickly made.
    weights = np.empty((count, *stored.shape), np.uint8)
    weights[:] = stored
    views = [make_view(format, weight) for weight in weights]
    x = generator.standard_normal((num_rows, COLS)).astype(np.float32)
    out = np.empty((num_rows, ROWS), np.float32)
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
        _native.multiply(views[index], x, "bf16", 0, ROWS, out)

    def read(index: int) -> None:
        _native.read_checksum(weights[index].reshape(-1), 0, matrix_bytes)

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
    print(
        f"{format} GEMV {ROWS} x {COLS}, {num_rows} rows, one thread, {count} matrices of "
        f"{gigabytes:.2f} GB in turn"
    )
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("format", nargs="?", default="fp8", choices=FORMATS)
    parser.add_argument("--rows", type=int, default=1, help="activation rows")
    arguments = parser.parse_args()
    gemv(arguments.format, arguments.rows)
