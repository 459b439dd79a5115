"""An engine whose prompts a GPU reads, by hand: ``python tests/measure_gpu_engine.py``.

First mini: greedy tokens of both devices, at several thresholds. Then a few layers of DeepSeek-V3's
real shapes with random weights (or --model PATH): seconds of prompts through the whole flow, rate
of the stream, waits, time to cancel, and what a prompt costs that goes on after a cancel. One JSON
object a line. Needs torch with CUDA, numpy and the native module.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from moechat import Engine, SamplingParams
from moechat.bench.settings import model_entry
from moechat.bench.synthetic.config import Shape
from moechat.bench.synthetic.folder import write_model
from moechat.bench.synthetic.tensors import Recipe
from moechat.events import PrefillProgress, TurnStats

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_end=True)


def say(what: str, **facts: Any) -> None:
    print(json.dumps({"what": what, **facts}), flush=True)


def rounded(stats: TurnStats) -> dict[str, Any]:
    stream = stats.prefill_stream_seconds
    return {
        "device": stats.prefill_device,
        "prefill_seconds": round(stats.prefill_seconds, 3),
        "tokens_per_second": round(stats.prefill_tokens_per_second),
        "streamed_gb": round(stats.prefill_streamed_bytes / 1e9, 2),
        "stream_gb_per_s": round(stats.prefill_streamed_bytes / stream / 1e9, 1) if stream else 0,
        "compute_seconds": round(stats.prefill_compute_seconds, 3),
        "wait_seconds": round(stats.prefill_wait_seconds, 3),
        "kv_encode_seconds": round(stats.kv_encode_seconds, 3),
        "kv_decode_seconds": round(stats.kv_decode_seconds, 3),
        "attention": stats.prefill_attention,
        "resumed_layers": stats.prefill_resumed_layers,
    }


def tokens_of(engine: Engine, ids: list[int]) -> list[int]:
    events = engine.session().generate(ids, GREEDY)
    return [event.token_id for event in events if event.token_id is not None]


def check_mini(device: str) -> None:
    ids = [0, 3, 1204, 5, 4, *range(100, 600)]
    with Engine.open("mini") as engine:
        want = tokens_of(engine, ids)
    for threshold in (0, 100, 505, 10_000, None):
        began = time.perf_counter()
        with Engine.open("mini", device=device, gpu_prefill_tokens=threshold) as engine:
            opened = time.perf_counter() - began
            same = tokens_of(engine, ids) == want
        say("mini", threshold=threshold, same_tokens=same, opening_seconds=round(opened, 2))


def cancel_and_go_on(engine: Engine, ids: list[int]) -> None:
    session, cancelled_at = engine.session(), 0.0

    def cancel() -> None:
        nonlocal cancelled_at
        cancelled_at = time.perf_counter()
        session.cancel()

    for event in session.generate(ids, GREEDY):
        if isinstance(event, PrefillProgress) and event.layers_done == 2:
            threading.Timer(0.05, cancel).start()
    say("cancelled", seconds=round(time.perf_counter() - cancelled_at, 3))
    session.rewind(0)
    session.extend(ids, logits="last")
    say("went on", **rounded(session.last_stats))
    session.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gpu-memory-gb", type=float)
    parser.add_argument("--tokens", default="2048,8192,32768,32768")
    parser.add_argument("--folder")
    asked = parser.parse_args()
    check_mini(asked.device)
    with ExitStack() as stack:
        path = asked.model
        if path is None:
            path = stack.enter_context(tempfile.TemporaryDirectory(dir=asked.folder))
            whole = Shape.of_entry("deepseek-v3", model_entry("deepseek-v3"))
            shape = whole.cut(dense_layers=1, moe_layers=asked.layers, vocab=4096)
            write_model(Path(path), shape, Recipe.of(whole, None), lambda done, of: None)
        memory = asked.gpu_memory_gb
        began = time.perf_counter()
        engine = stack.enter_context(
            Engine.open(
                path,
                device=asked.device,
                gpu_prefill_tokens=0,
                gpu_memory_bytes=None if memory is None else int(memory * 1e9),
            )
        )
        gpu = engine.prefill_choice.gpu
        assert gpu is not None
        say(
            "opened",
            seconds=round(time.perf_counter() - began, 2),
            max_tokens=gpu.max_tokens,
            pass_gb=round(gpu.pass_bytes / 1e9, 2),
        )
        random = np.random.default_rng(0)
        for count in map(int, asked.tokens.split(",")):
            session = engine.session()
            ids = random.integers(0, engine.spec.vocab_size, count).tolist()
            session.extend(ids, logits="last")
            say("prompt", tokens=count, **rounded(session.last_stats))
            session.close()
        cancel_and_go_on(engine, ids)


if __name__ == "__main__":
    main()
