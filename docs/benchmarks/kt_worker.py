"""kt-kernel's experts behind a pipe, for compare_kt.py; run by the Python that has kt-kernel.

Arguments: FORMAT FILE EXPERTS THREADS. kt-kernel copies every expert out of the file into its own
tiled layout; the file is let go after that.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import expert_files
import kt_kernel  # type: ignore[import-not-found]
import numpy as np
import torch  # type: ignore[import-not-found]
from kt_kernel import kt_kernel_ext as kt
from pipe import serve

MAX_TOKENS = 64
# What kt-kernel's own wrapper takes for checkpoints of these formats, and its quantisation setting.
CLASSES = {
    "fp8": ("AMXFP8_MOE", 8, 128),
    "int4": ("AMXInt4_KGroup_MOE", 4, 32),
    "mxfp4": ("AMXFP4_KGroup_MOE", 4, 32),
    "bf16": ("AMXBF16_MOE", 16, 0),
}


class Worker:
    """One layer's routed experts."""

    def __init__(self, format_: str, path: str, num_experts: str, threads: str) -> None:
        self._class, bits, group = CLASSES[format_]
        experts = expert_files.open_file(Path(path), format_, int(num_experts))
        self._pool = self._start(int(threads))
        config = kt.moe.MOEConfig(
            len(experts),
            expert_files.EXPERTS_PER_TOKEN,
            expert_files.HIDDEN,
            expert_files.INNER,
            0,
        )
        config.layer_idx, config.max_len, config.pool = 0, MAX_TOKENS, self._pool.backend_
        config.quant_config.bits = bits
        config.quant_config.group_size = group
        config.quant_config.zero_point = False
        kept = []  # scales that were converted live until they are loaded
        for name in expert_files.MATRICES:
            setattr(config, f"{name}_projs", [[self._address(e[name][0]) for e in experts]])
            addresses = [0] * len(experts)
            if format_ != "bf16":
                scales = [e[name][1] for e in experts]
                if format_ == "mxfp4":  # it takes powers of two as BF16
                    scales = [scale.astype(np.uint16) << 7 for scale in scales]
                kept.append(scales)
                addresses = [self._address(scale) for scale in scales]
            setattr(config, f"{name}_scales", [addresses])
        self._moe = getattr(kt.moe, self._class)(config)
        same = torch.arange(len(experts), dtype=torch.int64)
        self._pool.submit(self._moe.load_weights_task(same.data_ptr()))
        self._pool.sync()

    @staticmethod
    def _start(threads: int) -> Any:
        config = kt.WorkerPoolConfig()
        config.subpool_count = 1
        config.subpool_numa_map = [0]
        config.subpool_thread_count = [threads]
        return kt.CPUInfer(config)

    @staticmethod
    def _address(array: np.ndarray) -> int:
        return int(array.__array_interface__["data"][0])

    def info(self) -> str:
        """Version, which build of the wheel the processor got, and the class that computes."""
        return f"{kt_kernel.__version__}, variant {kt_kernel.__cpu_variant__}, {self._class}"

    def outputs(
        self, x: list[list[float]], ids: list[list[int]], weights: list[list[float]]
    ) -> list[list[float]]:
        """Results for x [tokens][7168], rounded to BF16 on their way in and out."""
        call = self._call(x, ids, weights)
        self._run(call)
        result: list[list[float]] = call[-1].float().tolist()
        return result

    def burst(self, x: list[list[float]], ids: list[list[list[int]]]) -> list[float]:
        """Seconds of each call; ids [calls][tokens][8]."""
        share = 1 / expert_files.EXPERTS_PER_TOKEN
        calls = [self._call(x, of, [[share] * len(of[0])] * len(of)) for of in ids]
        seconds = []
        for call in calls:
            began = time.perf_counter()
            self._run(call)
            seconds.append(time.perf_counter() - began)
        return seconds

    @staticmethod
    def _call(
        x: list[list[float]], ids: list[list[int]], weights: list[list[float]]
    ) -> tuple[Any, ...]:
        rows = torch.tensor(x, dtype=torch.bfloat16).contiguous()
        return (
            torch.tensor([len(ids)], dtype=torch.int32),
            torch.tensor(ids, dtype=torch.int64),
            torch.tensor(weights, dtype=torch.float32),
            rows,
            torch.zeros_like(rows),
        )

    def _run(self, call: tuple[Any, ...]) -> None:
        count, ids, weights, x, y = call
        task = self._moe.forward_task(
            count.data_ptr(),
            ids.shape[1],
            ids.data_ptr(),
            weights.data_ptr(),
            x.data_ptr(),
            y.data_ptr(),
            False,
        )
        self._pool.submit(task)
        self._pool.sync()


if __name__ == "__main__":
    serve(Worker)
