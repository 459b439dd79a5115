"""Hybrid decode on a GPU, run by hand: ``measure_hybrid.py [--part smoke|speed|deep|all]``.

"smoke": small models on the device against the CPU's own decode; batches, cancel, a lost server.
"speed": a synthetic DeepSeek-V3 of a few layers of real shapes: what a token and a layer take,
split into the CPU's experts, the GPU and the hand-over; anti-phase; extrapolated to 61 layers.
"deep": the same of 61 layers, those on disk again and again (deep_model): nothing extrapolated.
Needs the native module, torch and numpy; 11.5 GB of memory and of the folder's disk a MoE layer.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from deep_model import deepened, synthetic
from hybrid_smoke import (
    NEVER,
    a_decoding,
    began,
    cancelled,
    hot_experts,
    hot_on_the_device,
    lost,
    opened,
    say,
    smoke,
)

from moechat import _native
from moechat.bench.reading import Reader, populate
from moechat.bench.settings import model_entry
from moechat.bench.synthetic.config import Shape
from moechat.bench.synthetic.folder import SyntheticModel, write_model
from moechat.bench.synthetic.tensors import Recipe
from moechat.decode.gpu.hybrid_loop import HybridDecode
from moechat.decode.gpu.mailbox import ABORTED
from moechat.engine.engine import Engine

WHOLE_DENSE, WHOLE_MOE = 3, 58
MINI = Path(__file__).parents[1] / "moechat" / "data" / "mini"


class Rate:
    """Steps of some sessions, timed: seconds a step, and of those the server's."""

    def __init__(self, engine: Engine, hybrid: HybridDecode, sessions: int) -> None:
        self.engine, self.hybrid = engine, hybrid
        pairs = [a_decoding(engine, seed) for seed in range(sessions)]
        self.members, self.sessions, self.queues = [list(part) for part in zip(*pairs)]

    def steps(self, count: int) -> dict[str, float]:
        before = server_times(self.hybrid)
        start = time.perf_counter()
        done = 0
        while done < count:
            done += self.hybrid.generate(self.members, NEVER, min(32, count - done))
            for queue in self.queues:  # a full one would stop it
                queue.pop(0.0)
        seconds = time.perf_counter() - start
        after = server_times(self.hybrid)
        requests = max(1, after["num_requests"] - before["num_requests"])
        return {
            "step_seconds": seconds / done,
            "experts_seconds": (after["experts_seconds"] - before["experts_seconds"]) / requests,
            "waiting_seconds": (after["waiting_seconds"] - before["waiting_seconds"]) / requests,
            "tokens_per_second": len(self.members) * done / seconds,
        }

    def close(self) -> None:
        for session in self.sessions:
            session.close()


def server_times(hybrid: HybridDecode) -> dict[str, float]:
    nothing = {"experts_seconds": 0.0, "waiting_seconds": 0.0, "num_requests": 0}
    return dict(hybrid.server.times) if hybrid.server is not None else nothing


def no_experts_on_cpu(engine: Engine, hybrid: HybridDecode, share: float) -> None:
    """The CPU leaves out this share of every layer's experts, as if the GPU had them."""
    count = engine.spec.moe.num_experts
    chosen = np.random.default_rng(1).permutation(count)[: round(share * count)]
    for layer in range(hybrid.server.num_moe_layers if hybrid.server is not None else 0):
        hybrid.server.set_gpu_experts(layer, np.sort(chosen).astype(np.int32))


def gpu_chain_seconds(hybrid: HybridDecode) -> float:
    """Of a step whose posts and waits return at once: the GPU's own work."""
    lane = hybrid.lanes[0]
    if lane.device.type != "cuda":
        return float("nan")
    runner = lane._runner
    lane.prepare(1)
    if lane.mailbox is not None:
        lane.mailbox.error.fill_(ABORTED)
    torch.cuda.synchronize()
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        with torch.cuda.stream(runner._streams[0]):
            runner._graphs[1, False].graph.replay()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    lane.reset()
    if hybrid.server is not None:
        hybrid.server.reset(0)
    return statistics.median(seconds)


def expert_bytes(engine: Engine) -> int:
    """Weights and scales that a token's experts of a layer have."""
    spec = engine.spec
    elements = 3 * spec.hidden_size * spec.moe.intermediate_size
    return spec.moe.num_experts_per_token * (elements + elements // 128 // 128 * 4)


def reading_rate(engine: Engine, folder: Path) -> float:
    files = sorted({path.resolve() for path in engine.model.files.weight_files})
    largest = max(files, key=lambda path: path.stat().st_size)
    mapping = np.memmap(largest, np.uint8, "r")
    populate([largest], 1 << 40)
    reader = Reader([mapping], {engine.threads: engine.pool}, 0.5)
    reading = reader.read(engine.threads)
    return float(reading.best)


def part_times(folder: Path, device: str, steps: int, threads: int | None) -> dict[str, float]:
    with opened(folder, device, threads=threads) as (engine, hybrid):
        populate([path.resolve() for path in engine.model.files.weight_files], 1 << 40)
        return times_of(engine, hybrid, steps)


def times_of(engine: Engine, hybrid: HybridDecode, steps: int) -> dict[str, float]:
    """One session: with the CPU's experts, with answers at once, and without any wait."""
    rate = Rate(engine, hybrid, 1)
    rate.steps(8)
    found = rate.steps(steps)
    no_experts_on_cpu(engine, hybrid, 1.0)
    found["answered_at_once_seconds"] = rate.steps(steps)["step_seconds"]
    no_experts_on_cpu(engine, hybrid, 0.0)
    rate.close()
    found["gpu_seconds"] = gpu_chain_seconds(hybrid)
    return found


def speed(device: str, options: argparse.Namespace) -> None:
    whole = Shape.of_entry(options.model, model_entry(options.model))
    shape = whole.cut(dense_layers=2, moe_layers=options.layers, experts=options.experts)
    shape = shape.cut(vocab=options.vocab or whole.vocab)
    recipe = Recipe.of(shape, None)
    folder = Path(tempfile.mkdtemp(prefix="moechat-hybrid-", dir=options.folder))
    try:
        write_model(folder, shape, recipe, lambda done, total: None)
        say(f"written: {shape.moe_layers} MoE layers, {shape.experts} experts, at {folder}")
        measure_speed(SyntheticModel(folder, shape, recipe), device, options)
    finally:
        shutil.rmtree(folder)


def measure_speed(model: SyntheticModel, device: str, options: argparse.Namespace) -> None:
    steps, threads, shape = options.steps, options.threads, model.shape
    small = shape.cut(dense_layers=1, moe_layers=0)
    parts = {
        "1+0": small,
        "2+0": small.cut(dense_layers=2),
        "2+1": small.cut(dense_layers=2, moe_layers=1),
    }
    times = {}
    for name, part in parts.items():
        times[name] = part_times(model.part(part), device, steps, threads)
        show_times(f"{name} layers", times[name])
    folder = model.part(shape)
    with opened(folder, device, threads=threads) as (engine, hybrid):
        populate([path.resolve() for path in engine.model.files.weight_files], 1 << 40)
        read = reading_rate(engine, folder)
        times["all"] = times_of(engine, hybrid, steps)
        show_times(f"{shape.dense_layers}+{shape.moe_layers} layers", times["all"])
        used = expert_bytes(engine) / times["all"]["experts_seconds"]
        say(
            f"CPU experts: {used / 1e9:.1f} GB/s, plain reading {read / 1e9:.1f} GB/s: "
            f"{used / read:.2f}; {engine.threads} threads"
        )
        extrapolate(times, shape)
        lanes = hybrid.lanes
        for share in (0.0, 0.5, 0.75):
            no_experts_on_cpu(engine, hybrid, share)
            for sessions in (1, 2):
                for anti_phase in (False, True)[:sessions]:
                    hybrid.lanes = lanes if anti_phase else lanes[:1]
                    if time.perf_counter() - began < options.limit:
                        beside(engine, hybrid, sessions, share, steps)
        hybrid.lanes = lanes
        no_experts_on_cpu(engine, hybrid, 0.0)
        if time.perf_counter() - began < options.limit:
            cancelled(engine, hybrid)
            lost(engine, hybrid)
            say(f"CPU decode alone: {cpu_alone(engine, steps) * 1e3:.2f} ms a token")
        hot = hot_experts(engine, options.hot)
    if options.hot and time.perf_counter() - began < options.limit:
        with opened(folder, device, threads=threads, gpu_experts=hot) as (engine, hybrid):
            populate([path.resolve() for path in engine.model.files.weight_files], 1 << 40)
            say(f"{options.hot:.2f} of the experts are the device's from here on")
            beside(engine, hybrid, 1, 0.0, steps, masked=False)
            beside(engine, hybrid, 2, 0.0, steps, masked=False)


def deep(device: str, options: argparse.Namespace) -> None:
    """Layers as many as the original's; anti-phase at several balances of CPU and GPU.

    Then of fewer layers: what one more MoE layer takes.
    """
    with ExitStack() as stack:
        path = options.path or stack.enter_context(synthetic(options.layers, options.folder))
        found = {}
        for layers in (WHOLE_DENSE + WHOLE_MOE, WHOLE_DENSE + WHOLE_MOE // 2):
            with deepened(layers), opened(path, device, threads=options.threads) as opened_one:
                engine, hybrid = opened_one
                populate([path.resolve() for path in engine.model.files.weight_files], 1 << 40)
                found[layers] = times_of(engine, hybrid, options.steps)
                show_times(f"{layers} layers", found[layers])
                if layers == WHOLE_DENSE + WHOLE_MOE:
                    used = expert_bytes(engine) / found[layers]["experts_seconds"]
                    read = reading_rate(engine, path)
                    say(
                        f"CPU experts {used / 1e9:.1f} GB/s, plain reading {read / 1e9:.1f} GB/s: "
                        f"{used / read:.2f}"
                    )
                    balances(engine, hybrid, options)
        (layers, whole), (fewer, half) = found.items()
        one = {
            key: (whole[key] - half[key]) / (layers - fewer) for key in whole if key in _STEP_TIMES
        }
        show_times("one more MoE layer", one)
        requests = [
            moe * part["experts_seconds"]
            for moe, part in zip((WHOLE_MOE, WHOLE_MOE // 2), (whole, half))
        ]
        experts = (requests[0] - requests[1]) / (layers - fewer)
        rest = one["step_seconds"] - experts
        say(
            f"of it the CPU's experts {experts * 1e3:.3f} ms, hand-over and GPU {rest * 1e3:.3f} ms"
        )


_STEP_TIMES = ("step_seconds", "answered_at_once_seconds", "gpu_seconds")


def balances(engine: Engine, hybrid: HybridDecode, options: argparse.Namespace) -> None:
    """One session, two in a batch, and two in turns, where a share of the experts is left out."""
    lanes = hybrid.lanes
    for share in options.shares:
        no_experts_on_cpu(engine, hybrid, share)
        for sessions, anti_phase in ((1, False), (2, False), (2, True)):
            hybrid.lanes = lanes if anti_phase else lanes[:1]
            beside(engine, hybrid, sessions, share, options.steps)
    hybrid.lanes = lanes
    no_experts_on_cpu(engine, hybrid, 0.0)


def show_times(name: str, found: dict[str, float]) -> None:
    seconds = {key[:-8]: value for key, value in found.items() if key.endswith("_seconds")}
    say(f"{name}:", ", ".join(f"{key} {value * 1e3:.3f} ms" for key, value in seconds.items()))


def extrapolate(times: dict[str, dict[str, float]], shape: Shape) -> None:
    keys = ("step_seconds", "answered_at_once_seconds", "gpu_seconds")
    dense = {key: times["2+0"][key] - times["1+0"][key] for key in keys}
    moe = {key: (times["all"][key] - times["2+1"][key]) / (shape.moe_layers - 1) for key in keys}
    show_times("a dense layer", dense)
    show_times("a MoE layer", moe)
    experts, gpu = times["all"]["experts_seconds"], moe["gpu_seconds"]
    say(
        f"a MoE layer: CPU experts {experts * 1e3:.3f} ms, GPU {gpu * 1e3:.3f} ms, the rest "
        f"{(moe['step_seconds'] - experts - gpu) * 1e3:.3f} ms; answered at once the rest is "
        f"{(moe['answered_at_once_seconds'] - gpu) * 1e3:.3f} ms"
    )
    for key in keys:
        total = (
            times["all"][key]
            + (WHOLE_MOE - shape.moe_layers) * moe[key]
            + (WHOLE_DENSE - shape.dense_layers) * dense[key]
        )
        say(f"61 layers, {key[:-8]}: {total * 1e3:.2f} ms a token, {1 / total:.1f} tok/s")


def beside(
    engine: Engine,
    hybrid: HybridDecode,
    sessions: int,
    share: float,
    steps: int,
    masked: bool = True,
) -> None:
    rate = Rate(engine, hybrid, sessions)
    rate.steps(8)
    found = rate.steps(steps)
    rate.close()
    say(
        f"{sessions} sessions, {len(hybrid.lanes)} lanes, "
        + (f"{share:.2f} of the experts left out: " if masked else "experts on the device: ")
        + f"{found['tokens_per_second']:.1f} tok/s, step {found['step_seconds'] * 1e3:.2f} ms; "
        f"of a request experts {found['experts_seconds'] * 1e3:.3f} ms, "
        f"waiting {found['waiting_seconds'] * 1e3:.3f} ms"
    )


def cpu_alone(engine: Engine, steps: int) -> float:
    decoding, session, _ = a_decoding(engine, 0)
    step = _native.DecodeStep(engine.model.native, engine.pool)
    generations = [decoding.generation]
    _native.generate(step, engine.model.native, generations, NEVER, 4)
    start = time.perf_counter()
    _native.generate(step, engine.model.native, generations, NEVER, min(steps, 24))
    seconds = (time.perf_counter() - start) / min(steps, 24)
    session.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=("smoke", "speed", "deep", "all"), default="all")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--model", default="deepseek-v3")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=0)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--hot", type=float, default=0.5, help="share of experts on the GPU")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds; then no new part")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--path", type=Path, help="of the model of part deep")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.0, 0.85, 0.92, 0.96])
    parser.add_argument("--models", type=Path, nargs="*", default=[MINI])
    options = parser.parse_args()
    if options.part in ("smoke", "all"):
        smoke(options.device, options.models)
        hot_on_the_device(MINI, options.device)
    if options.part in ("speed", "all"):
        speed(options.device, options)
    if options.part == "deep":
        deep(options.device, options)


if __name__ == "__main__":
    main()
