"""Hybrid decode of small models on a device, and what measure_hybrid.py needs, too."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moechat import SamplingParams, _native
from moechat.decode.device_decode import Decoding
from moechat.decode.gpu.hybrid_loop import HybridDecode, _Batch
from moechat.engine import loading
from moechat.engine.engine import Engine

NEVER = _native.CancelFlag()
began = time.perf_counter()


def say(*words: Any) -> None:
    print(f"[{time.perf_counter() - began:6.1f} s]", *words, flush=True)


@contextmanager
def opened(
    folder: Path,
    device: str,
    gpu_experts: dict[int, list[int]] | None = None,
    **settings: Any,
) -> Iterator[tuple[Engine, HybridDecode]]:
    """``gpu_experts``: the device's, by layer, as many of each."""
    threads = settings.pop("threads", None)
    compute = settings.pop("compute", "bf16")
    settings.setdefault("anti_phase", True)
    with Engine.open(folder, threads=threads, compute=compute) as engine:
        hybrid = HybridDecode(
            engine.spec,
            loading.find_model_files(folder).bind(),
            engine.model.native,
            engine.pool,
            device=device,
            compute=compute,
            **settings,
        )
        if gpu_experts and engine.spec.moe is not None:
            hold(hybrid, engine.spec.moe.num_experts, gpu_experts)
        engine.decode.device = hybrid
        yield engine, hybrid


def hold(hybrid: HybridDecode, num_experts: int, by_layer: dict[int, list[int]]) -> None:
    """Have the device hold these, as if a prompt had used no others."""
    hybrid.hold_experts(max(len(ids) for ids in by_layer.values()))
    uses = {layer: np.isin(np.arange(num_experts), ids) for layer, ids in by_layer.items()}
    hybrid.prompt_read({layer: used.astype(np.int64) for layer, used in uses.items()})
    assert hybrid.hot is not None
    hybrid.hot.advance()


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
    exchanged(folder, device)


def exchanged(folder: Path, device: str) -> None:
    """The same for those that prompts use, one prompt after another, through the whole engine."""
    device = "torch-cpu" if device == "cpu" else device
    settings = {"device": device, "gpu_prefill_tokens": 0, "gpu_decode": "on"}
    with Engine.open(folder, **settings) as plain:
        half = plain.spec.moe.num_experts // 2 if plain.spec.moe is not None else 0
        theirs = [tokens_of(plain, seed, 48, length=64) for seed in range(4)]
    with Engine.open(folder, gpu_experts=half, **settings) as engine:
        for turn in range(3):
            ours = [tokens_of(engine, seed, 48, length=64) for seed in range(4)]
            same = [
                next((i for i, (a, b) in enumerate(zip(x, y)) if a != b), len(x))
                for x, y in zip(ours, theirs)
            ]
            held = engine.decode.device.num_held_experts
            note = f"{held} of {half} held; equal up to {same} of 48"
            check(f"experts exchanged, turn {turn}", sum(same) >= 96 and held > 0, note)
        calls = [lambda s=seed: tokens_of(engine, s, 48, length=64) for seed in range(4)]
        check("the same in batches", sum(a == b for a, b in zip(at_once(calls), ours)) >= 3)
        hot = engine.decode.device.hot
        start = time.perf_counter()
        uses_E = np.arange(2 * half, 0, -1)
        for order in (uses_E, uses_E[::-1]):
            hot.want(dict.fromkeys(hot.layers, order))
            hot.advance()
        seconds = time.perf_counter() - start
        say(f"about {hot.num_bytes / seconds / 1e9:.2f} GB/s of copies, at least")


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
    hybrid._begin(lane, _Batch([decoding]))
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
