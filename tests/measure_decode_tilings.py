"""How to cut up decode's products and attention: ``python tests/measure_decode_tilings.py``.

Times of many tilings at DeepSeek-V3's shapes, then of each kernel of a layer. On a GPU, by hand.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from moechat.decode.gpu import ops, plain_ops, triton_latent, triton_linear
from moechat.decode.gpu.weight_views import shape_of
from moechat.gpu_weights.weight import Fp8Matrix

sys.path.insert(0, str(Path(__file__).parent / "decode_gpu"))
from measured_layer import (
    DEVICE,
    HEADS,
    SIZES,
    Layer,
    Step,
    failures,
    graph_of,
    microseconds,
)  # fmt: skip

SHARES = 14  # processes that compile


def sweep_jobs(layers: list[Layer]) -> list[tuple[str, Callable[[], float]]]:
    """Many ways to cut up each product and attention; a job gives the microseconds of one."""
    jobs: list[tuple[str, Callable[[], float]]] = []
    random = torch.Generator(device=DEVICE).manual_seed(3)
    shapes: dict[str, tuple[Callable[[Layer], Fp8Matrix], bool]] = {
        "qkv_a": (lambda e: e.inputs, True), "q_b": (lambda e: e.q_b, True),
        "o": (lambda e: e.o, False), "gate_up": (lambda e: e.gate_up, True),
    }  # fmt: skip
    counters = torch.zeros(8192, dtype=torch.int32, device=DEVICE)

    def product(
        weight: Callable[[Layer], object], normed: bool, tiling: triton_linear.Tiling, exact: bool
    ) -> float:
        outputs, inputs = shape_of(weight(layers[0]))
        x = torch.randn(1, inputs, generator=random, device=DEVICE)
        norm = ops.Norm(torch.ones(inputs, device=DEVICE), 1e-6) if normed else None
        out = torch.zeros(1, outputs, device=DEVICE)

        def run() -> None:
            for layer in layers:
                triton_linear.linear(
                    x, weight(layer), counters, out, norm=norm, exact=exact, tiling=tiling
                )

        spent = microseconds(graph_of(run), len(layers))
        want = plain_ops.linear(x, weight(layers[-1]), norm=norm, exact=True)
        if not ((out - want).norm() / want.norm()).item() < 4e-3:
            failures.append(f"wrong {tiling}")
        return spent

    def add(name: str, weight: Callable, normed: bool, cut: tuple, exact: bool = False) -> None:
        outputs, inputs = shape_of(weight(layers[0]))
        tile, warps, stages, half, programs = cut
        parts = max(1, min(round(programs / -(-outputs // tile)), inputs // 256, 16))
        part_inputs = -(-inputs // parts // 128) * 128
        parts = -(-inputs // part_inputs)
        tiling = triton_linear.Tiling(tile, 128, parts, part_inputs, stages, warps, half)
        jobs.append((f"{name} {tiling}", lambda: product(weight, normed, tiling, exact)))

    for name, (weight, normed) in shapes.items():
        for tile, warps, stages in (
            (64, 4, 4), (64, 4, 6), (128, 4, 3), (128, 4, 4), (128, 8, 4), (256, 8, 3), (32, 4, 6),
        ):  # fmt: skip
            for programs in (132, 264, 528):
                add(name, weight, normed, (tile, warps, stages, True, programs))
        add(name, weight, normed, (128, 4, 4, False, 264))
    for tile, programs, stages in ((16, 132, 3), (16, 224, 4), (32, 132, 4), (16, 64, 4)):
        add("router", lambda e: e.router, True, (tile, 4, stages, False, programs), True)
    query = torch.randn(1, HEADS * 192, generator=random, device=DEVICE)
    kv = torch.randn(1, SIZES.kv_width, generator=random, device=DEVICE)
    steps = {slots: Step(1, slots, 7) for slots in (1000, 16000)}

    def attention(slots: int, tiling: triton_latent.Tiling) -> float:
        triton_latent.TILING = tiling
        graph = graph_of(lambda: [steps[slots].attend(layer, query, kv) for layer in layers])
        return microseconds(graph, len(layers))

    for cut in (
        (32, 32, 8, 2), (32, 32, 8, 3), (32, 64, 8, 2), (16, 32, 4, 2), (16, 64, 4, 2),
        (32, 32, 4, 2), (16, 64, 8, 2), (16, 32, 4, 3),
    ):  # fmt: skip
        tiling = triton_latent.Tiling(*cut)
        for slots in steps:
            jobs.append(
                (f"attention n={slots} {tiling}", lambda n=slots, t=tiling: attention(n, t))
            )
    return jobs


def sweep(layers: list[Layer], share: slice) -> None:
    for name, job in sweep_jobs(layers)[share]:
        try:
            print(f"sweep {name}: {job():.1f} us", flush=True)
        except Exception as error:
            print(f"sweep {name}: {str(error)[:100]}", flush=True)


def profile(layers: list[Layer]) -> None:
    """Time of each kernel by the profiler."""
    for rows, slots in ((1, 1000), (1, 16000), (8, 1000)):
        step = Step(rows, slots, 13)

        def run(step: Step = step) -> None:
            for layer in layers:
                step.attention(layer)
                step.post(layer)
                step.shared(layer)

        graph = graph_of(run)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            graph.replay()
            graph.replay()
            torch.cuda.synchronize()
        found: dict[tuple[str, str], list[float]] = {}
        for event in seen.events():
            found.setdefault((event.name[:40], ""), []).append(event.device_time)
        for (name, _), spent in found.items():
            order = [f"{us:.1f}" for us in spent[:8]]
            print(f"profile R={rows} n={slots} {name}: {' '.join(order)} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--warm", type=int, metavar="SHARE", help="compile the kernels of one share, no more"
    )
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU here: the kernels run on one")
    if chosen.warm is not None:
        sweep([Layer(0)], slice(chosen.warm, None, SHARES))
        return
    command = [sys.executable, __file__, "--warm"]
    warmers = [
        subprocess.Popen([*command, str(share)], stdout=subprocess.DEVNULL)
        for share in range(SHARES)
    ]
    for warmer in warmers:
        warmer.wait(100)
    layers = [Layer(seed) for seed in range(8)]
    sweep(layers, slice(None))
    profile(layers)
    print("FAILED: " + ", ".join(failures) if failures else "ALL OK")


if __name__ == "__main__":
    main()
