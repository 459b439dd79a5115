"""Hybrid decode on a GPU, run by hand: ``python tests/measure_hybrid.py [--part smoke|speed|all]``.

"smoke": small models on the device against the CPU's own decode; batches, cancel, a lost server.
"speed": a synthetic DeepSeek-V3 of a few layers of real shapes: what a token and a layer take,
split into the CPU's experts, the GPU and the hand-over; anti-phase; extrapolated to 61 layers.
Needs the native module, torch and numpy; 11.5 GB of memory and of the folder's disk a MoE layer.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moechat import SamplingParams, _native
from moechat.bench.reading import Reader, populate
from moechat.bench.settings import model_entry
from moechat.bench.synthetic.config import Shape
from moechat.bench.synthetic.folder import SyntheticModel, write_model
from moechat.bench.synthetic.tensors import Recipe
from moechat.decode.device_decode import Decoding
from moechat.decode.gpu.hybrid_loop import HybridDecode
from moechat.decode.gpu.mailbox import ABORTED
from moechat.engine.engine import Engine
from moechat.engine.model_files import find_model_files

WHOLE_DENSE, WHOLE_MOE = 3, 58
MINI = Path(__file__).parents[1] / "moechat" / "data" / "mini"
NEVER = _native.CancelFlag()
began = time.perf_counter()


def say(*words: Any) -> None:
    print(f"[{time.perf_counter() - began:6.1f} s]", *words, flush=True)


@contextmanager
def opened(folder: Path, device: str, **settings: Any) -> Iterator[tuple[Engine, HybridDecode]]:
    threads = settings.pop("threads", None)
    compute = settings.pop("compute", "bf16")
    with Engine.open(folder, threads=threads, compute=compute) as engine:
        hybrid = HybridDecode(
            engine.spec,
            find_model_files(folder).bind(),
            engine.model.native,
            engine.pool,
            device=device,
            compute=compute,
            **settings,
        )
        engine.decode.device = hybrid
        yield engine, hybrid


def ids_of(engine: Engine, seed: int, length: int) -> list[int]:
    random = np.random.default_rng(seed)
    return random.integers(3, engine.spec.vocab_size, length).tolist()


def tokens_of(engine: Engine, seed: int, count: int, length: int = 16) -> list[int]:
    session = engine.session()
    params = SamplingParams(temperature=0, max_tokens=count, ignore_end=True)
    events = session.generate(ids_of(engine, seed, length), params)
    tokens = [event.token_id for event in events if event.token_id is not None]
    session.close()
    return tokens


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    results: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        results[number] = calls[number]()

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def check(name: str, good: bool, note: str = "") -> None:
    say(f"check {name}: {'ok' if good else 'FAILED'} {note}")


# Smoke


def smoke(device: str, folders: list[Path]) -> None:
    for folder in folders:
        with Engine.open(folder) as plain, opened(folder, device) as (engine, hybrid):
            say(f"{folder.name}: {hybrid.weights.num_bytes / 1e6:.1f} MB of weights on the device")
            alone = [tokens_of(engine, seed, 16 + seed) for seed in range(4)]
            theirs = [tokens_of(plain, seed, 16 + seed) for seed in range(4)]
            same = [
                next((i for i, (a, b) in enumerate(zip(x, y)) if a != b), len(x))
                for x, y in zip(alone, theirs)
            ]
            check("tokens as on the CPU", sum(same) >= 24, f"equal up to {same} of 16, 17, 18, 19")
            calls = [lambda s=seed: tokens_of(engine, s, 16 + s) for seed in range(4)]
            check("batches of two lanes: the same tokens", at_once(calls) == alone)
            again = [tokens_of(engine, seed, 16 + seed) for seed in range(4)]
            check("again", again == alone)
            long = tokens_of(engine, 7, 8, length=300)  # the caches grow; graphs are made anew
            check("long prompt", len(long) == 8 and tokens_of(engine, 7, 8, length=300) == long)
            if hybrid.server is not None:
                cancelled(engine, hybrid)
                lost(engine, hybrid)
                check("after a lost step", tokens_of(engine, 0, 16) == alone[0])


def hot_on_the_device(folder: Path, device: str) -> None:
    """Half of the experts are the device's: kernels of their own."""
    with Engine.open(folder) as plain:
        hot = hot_experts(plain, 0.5)
        theirs = [tokens_of(plain, seed, 16) for seed in range(3)]
    with opened(folder, device, gpu_experts=hot) as (engine, _):
        ours = [tokens_of(engine, seed, 16) for seed in range(3)]
        same = [
            next((i for i, (a, b) in enumerate(zip(x, y)) if a != b), len(x))
            for x, y in zip(ours, theirs)
        ]
        check("half of the experts on the device", sum(same) >= 24, f"equal up to {same} of 16")
        calls = [lambda s=seed: tokens_of(engine, s, 16) for seed in range(3)]
        check("the same in batches", at_once(calls) == ours)


def hot_experts(engine: Engine, share: float) -> dict[int, list[int]]:
    count = engine.spec.moe.num_experts if engine.spec.moe is not None else 0
    chosen = np.random.default_rng(1).permutation(count)[: round(share * count)]
    moe_layers = [n for n, layer in enumerate(engine.spec.layers) if layer.moe]
    return {layer: sorted(chosen.tolist()) for layer in moe_layers}


def idle_after(hybrid: HybridDecode) -> float:
    """Seconds until the card has nothing to do."""
    start = time.perf_counter()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def cancelled(engine: Engine, hybrid: HybridDecode) -> None:
    seconds = []
    for attempt in range(5):
        session = engine.session()
        params = SamplingParams(temperature=0, max_tokens=4000, ignore_end=True)
        events = iter(session.generate(ids_of(engine, attempt, 16), params))
        for _ in range(4):
            next(events)
        start = time.perf_counter()
        session.cancel()
        for event in events:
            last = event
        seconds.append(time.perf_counter() - start)
        if torch.cuda.is_available():
            seconds[-1] += idle_after(hybrid)
        session.close()
    say(f"cancel: prompt back and card idle after {max(seconds) * 1e3:.1f} ms at most; {last}")


def lost(engine: Engine, hybrid: HybridDecode) -> None:
    """The server stops: how long does the card stay busy until an abort, and without one?"""
    lane, (decoding, session, _) = hybrid.lanes[0], a_decoding(engine, 3)
    hybrid.caches.reserve([decoding.cache])
    lane.prepare(1)
    hybrid._begin(lane, _batch(decoding))
    time.sleep(0.05)
    busy = not lane.ended()
    start = time.perf_counter()
    hybrid.server.abort(0)
    while not lane.ended():
        time.sleep(0)
    seconds = time.perf_counter() - start
    hybrid._recover()
    check("nobody serves", busy, f"card free {seconds * 1e3:.2f} ms after the abort")
    session.close()


def _batch(decoding: Decoding) -> Any:
    from moechat.decode.gpu.hybrid_loop import _Batch

    return _Batch([decoding])


def a_decoding(engine: Engine, seed: int) -> tuple[Decoding, Any, Any]:
    """A generation that this thread steps; the decode thread has nothing to do meanwhile."""
    session = engine.session()
    ids = ids_of(engine, seed, 16)
    session.extend(ids, logits=None)
    sampler = _native.Sampler(
        vocab=engine.spec.vocab_size, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0,
        repetition_penalty=1.0, presence_penalty=0.0, seed=0,
    )  # fmt: skip
    queue, cancel = _native.TokenQueue(), _native.CancelFlag()
    generation = _native.Generation(
        engine.model.native, session.cache.native, sampler, queue, cancel, ids[-1],
        len(session.cache), 1 << 30, engine.context_tokens, [],
    )  # fmt: skip
    return Decoding(generation, session.cache, cancel), session, queue


# Speed


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
        with torch.cuda.stream(runner._stream):
            runner._graphs[1].graph.replay()
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
    parser.add_argument("--part", choices=("smoke", "speed", "all"), default="all")
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
    parser.add_argument("--models", type=Path, nargs="*", default=[MINI])
    options = parser.parse_args()
    if options.part in ("smoke", "all"):
        smoke(options.device, options.models)
        hot_on_the_device(MINI, options.device)
    if options.part in ("speed", "all"):
        speed(options.device, options)


if __name__ == "__main__":
    main()
