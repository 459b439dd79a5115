"""Prefill products of one format by instruction set, against its own dot product peak: ``gemm``."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
from measure_gemv import COLS, FORMATS, ROWS, make_view, stored_bytes

from moechat import _native

ROUNDS = 7
BURST_SECONDS = 0.1
ROTATION = 8  # matrices in turn: no expert's weights are in the caches when its turn comes
PEAK_ITERATIONS = {"ref": 100_000, "avx2": 100_000, "avx512": 50_000, "avx512bf16": 20_000}


def gemm(format: str, num_rows: int, outputs: int, names: list[str]) -> None:
    """Print GFLOP/s on one thread in tasks of ``outputs`` outputs, and shares of the peak.

    Instruction sets and their peaks take turns in short bursts; a share is taken within a round,
    and the median over the rounds. Time is CPU time of this thread, so that a neighbour who takes
    the core counts little (he still takes caches and memory).
    """
    generator = np.random.default_rng(1)
    stored = stored_bytes(format, generator)
    weights = np.empty((ROTATION, *stored.shape), np.uint8)
    weights[:] = stored
    views = [make_view(format, weight) for weight in weights]
    x = generator.standard_normal((num_rows, COLS)).astype(np.float32)
    out = np.empty((num_rows, ROWS), np.float32)
    before = _native.active_instruction_set()
    position = 0

    def rate(run: Callable[[], int]) -> float:
        """GFLOP/s of a burst; ``run`` returns its operations."""
        operations, began = 0, time.thread_time()
        while (seconds := time.thread_time() - began) < BURST_SECONDS or operations == 0:
            operations += run()
        return operations / seconds / 1e9

    def multiply() -> int:
        nonlocal position
        matrix, begin = divmod(position, -(-ROWS // outputs))
        begin *= outputs
        end = min(begin + outputs, ROWS)
        _native.multiply(views[matrix % ROTATION], x, "bf16", begin, end, out)
        position += 1
        return 2 * num_rows * (end - begin) * COLS

    rates: dict[str, list[float]] = {name: [] for name in names}
    peaks: dict[str, list[float]] = {name: [] for name in names}
    try:
        for _ in range(ROUNDS):
            for name in names:
                _native.force_instruction_set(name)
                iterations = PEAK_ITERATIONS.get(name, 10_000)
                peaks[name].append(rate(lambda n=iterations: _native.dot_peak(n)))
                rates[name].append(rate(multiply))
    finally:
        _native.force_instruction_set(before)

    print(
        f"{format} GEMM {ROWS} x {COLS}, {num_rows} rows, {outputs} outputs a task, one thread, "
        f"{ROTATION} matrices in turn"
    )
    print(
        f"{'':12}{'GFLOP/s':>9}{'min':>8}{'max':>8}{'peak':>8}{'/ peak':>8}{'/ ' + names[-1]:>10}"
    )
    for name in names:
        values = rates[name]
        to_peak = statistics.median(a / b for a, b in zip(values, peaks[name], strict=True))
        to_last = statistics.median(a / b for a, b in zip(values, rates[names[-1]], strict=True))
        print(
            f"{name:12}{statistics.median(values):9.1f}{min(values):8.1f}{max(values):8.1f}"
            f"{statistics.median(peaks[name]):8.1f}{to_peak:8.3f}{to_last:10.2f}"
        )


if __name__ == "__main__":
    supported = [name for name in _native.supported_instruction_sets() if name != "ref"]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("format", nargs="?", default="fp8", choices=FORMATS)
    parser.add_argument("--rows", type=int, default=512, help="activation rows")
    parser.add_argument("--outputs", type=int, default=ROWS, help="outputs of one call, as a task")
    parser.add_argument("--isa", nargs="+", default=supported, choices=supported)
    arguments = parser.parse_args()
    gemm(arguments.format, arguments.rows, arguments.outputs, arguments.isa)
