"""Decode beside a prompt on the same GPU: ``python tests/measure_beside.py``.

DeepSeek-V3's real shapes and depth, of random weights of which a few layers are on disk
(deep_model), or --model PATH. In turn: one session decodes alone; another's prompt is stream-loaded
alone; both at once. By token: median and 99th percentile of its time; by prompt: its seconds. One
JSON object a line, plain reading of memory alone and beside a prompt among them. Needs torch with
CUDA, numpy and the native module.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from deep_model import deepened, synthetic

from moechat import Engine, SamplingParams
from moechat.bench.reading import Reader, populate

ENDLESS = SamplingParams(temperature=0, max_tokens=100_000, ignore_end=True)


def say(what: str, **facts: Any) -> None:
    print(json.dumps({"what": what, **facts}), flush=True)


class Decoder:
    """A session that decodes on and on, on a thread; when each token came."""

    def __init__(self, engine: Engine, prompt: list[int]) -> None:
        self.session = engine.session()
        self.seconds: list[float] = []
        self._thread = threading.Thread(target=self._run, args=(prompt,))
        self._thread.start()
        while len(self.seconds) < 4:
            time.sleep(0.01)

    def _run(self, prompt: list[int]) -> None:
        for event in self.session.generate(prompt, ENDLESS):
            if getattr(event, "token_id", None) is not None:
                self.seconds.append(time.perf_counter())

    def between(self, began: float, ended: float) -> list[float]:
        """Seconds of the tokens that came wholly within."""
        times = [at for at in self.seconds if began <= at <= ended]
        return [after - before for before, after in itertools.pairwise(times)]

    def close(self) -> None:
        self.session.cancel()
        self._thread.join()
        self.session.close()


def prompt_seconds(engine: Engine, tokens: int, seed: int) -> tuple[float, float]:
    """When a prompt began and ended."""
    ids = np.random.default_rng(seed).integers(0, engine.spec.vocab_size, tokens).tolist()
    session = engine.session()
    began = time.perf_counter()
    session.extend(ids, logits="last")
    ended = time.perf_counter()
    stats = session.last_stats
    say(
        "prompt",
        tokens=tokens,
        seconds=round(ended - began, 3),
        device=stats.prefill_device,
        stream_seconds=round(stats.prefill_stream_seconds, 3),
        gb_per_s=round(stats.prefill_streamed_bytes / 1e9 / stats.prefill_stream_seconds, 1),
        wait_seconds=round(stats.prefill_wait_seconds, 3),
    )
    session.close()
    return began, ended


def shown(seconds: list[float]) -> dict[str, float]:
    return {
        "count": len(seconds),
        "median_ms": round(statistics.median(seconds) * 1e3, 2),
        "p99_ms": round(float(np.quantile(seconds, 0.99)) * 1e3, 2),
        "max_ms": round(max(seconds) * 1e3, 2),
    }


def server_times(engine: Engine) -> dict[str, float]:
    """Of the routed experts: sums since the engine was opened."""
    server = engine.decode.device.server  # type: ignore[union-attr]
    return dict(server.times)


def a_request(engine: Engine, before: dict[str, float]) -> dict[str, float]:
    """What one took on average since then: the experts, and the wait for it."""
    after = server_times(engine)
    count = max(1, after["num_requests"] - before["num_requests"])
    return {
        f"{name}_ms": round((after[f"{name}_seconds"] - before[f"{name}_seconds"]) / count * 1e3, 3)
        for name in ("experts", "waiting")
    }


def reading_rates(engine: Engine, tokens: int) -> None:
    """Plain reading alone, and beside a prompt: what decode's experts can have at best."""
    files = [file.resolve() for file in engine.model.files.weight_files]
    mapping = np.memmap(max(files, key=lambda file: file.stat().st_size), np.uint8, "r")
    populate(files, 1 << 40)
    reader = Reader([mapping], {engine.threads: engine.pool}, 0.4)
    alone = [reader.read(engine.threads).best for _ in range(5)]
    prompt = threading.Thread(target=prompt_seconds, args=(engine, tokens, 98))
    prompt.start()
    time.sleep(1.0)
    beside = []
    while prompt.is_alive():
        beside.append(reader.read(engine.threads).best)
    prompt.join()
    kept = beside[:-1] or beside  # the last one may have begun when the prompt had ended
    say(
        "plain reading",
        alone_gb_per_s=round(statistics.median(alone) / 1e9, 1),
        beside_gb_per_s=round(statistics.median(kept) / 1e9, 1),
        all_beside=[round(one / 1e9) for one in kept],
    )


def rounds(engine: Engine, options: argparse.Namespace) -> None:
    alone_s: list[float] = []
    beside_s: list[float] = []
    prompts: dict[str, list[float]] = {"alone": [], "beside": []}
    prompt_seconds(engine, options.tokens, 99)  # files page-locked, kernels compiled
    reading_rates(engine, options.tokens)
    for number in range(options.rounds):
        began, ended = prompt_seconds(engine, options.tokens, number)
        prompts["alone"].append(ended - began)
        decoder = Decoder(engine, list(range(3, 67)))
        began, served = time.perf_counter(), server_times(engine)
        time.sleep(options.alone_seconds)
        taken = decoder.between(began, time.perf_counter())
        alone_s += taken
        say("tokens alone", **shown(taken), **a_request(engine, served))
        served = server_times(engine)
        began, ended = prompt_seconds(engine, options.tokens, 50 + number)
        prompts["beside"].append(ended - began)
        taken = decoder.between(began, ended)
        beside_s += taken
        all_ms = [round(one * 1e3) for one in taken]
        say("tokens beside", **shown(taken), **a_request(engine, served), all_ms=all_ms)
        decoder.close()
    medians = {name: statistics.median(seconds) for name, seconds in prompts.items()}
    alone, beside = shown(alone_s), shown(beside_s)
    say(
        "result",
        alone=alone,
        beside=beside,
        median_ratio=round(beside["median_ms"] / alone["median_ms"], 3),
        p99_ratio=round(beside["p99_ms"] / alone["p99_ms"], 3),
        prompt_ratio=round(medians["beside"] / medians["alone"], 3),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--layers", type=int, default=3, help="MoE layers on disk")
    parser.add_argument("--depth", type=int, default=61, help="layers in all")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--alone-seconds", type=float, default=12.0)
    parser.add_argument("--gpu-memory-gb", type=float)
    parser.add_argument("--decode-share", type=float)
    parser.add_argument("--folder")
    asked = parser.parse_args()
    memory = asked.gpu_memory_gb
    with ExitStack() as stack:
        path = asked.model or stack.enter_context(synthetic(asked.layers, asked.folder))
        stack.enter_context(deepened(asked.depth))
        began = time.perf_counter()
        engine = stack.enter_context(
            Engine.open(
                path,
                device=asked.device,
                gpu_prefill_tokens=1000,
                gpu_decode="on",
                gpu_memory_bytes=None if memory is None else int(memory * 1e9),
                **({} if asked.decode_share is None else {"decode_share": asked.decode_share}),
            )
        )
        say("opened", seconds=round(time.perf_counter() - began, 2), layers=engine.spec.num_layers)
        rounds(engine, asked)


if __name__ == "__main__":
    main()
