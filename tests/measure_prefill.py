"""Stream-loading prefill of a model's real shapes on a GPU, by hand: tests/measure_prefill.py.

A few layers with random weights are built (moechat/bench/synthetic), and prompts pass through
them: time a layer, how long it waited for weights, rate of the copies beside that of a page-locked
copy in the same run, TFLOP/s of attention and experts, and what the whole model would take. With
--gpu-memory-gb the process gets no more of the device, and all matrices are streamed. Needs torch
with CUDA, numpy, and the native module.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moechat import _native
from moechat.bench.settings import model_entry
from moechat.bench.synthetic.config import Shape
from moechat.bench.synthetic.folder import write_model
from moechat.bench.synthetic.tensors import Recipe
from moechat.engine.model_files import find_model_files
from moechat.kv.cache import KVCache
from moechat.prefill.gpu import lane, layer_attention, stream_prefill
from moechat.prefill.gpu.plan import StreamSettings
from moechat.prefill.gpu.streamed_source import StreamedSource

PIECE = 8 << 20


class Spans:
    """Device time of wrapped functions, by name."""

    def __init__(self) -> None:
        self._events: dict[str, list[tuple[Any, Any]]] = {}

    def wrap(self, module: Any, name: str) -> None:
        inner = getattr(module, name)

        def timed(*given: Any, **named: Any) -> Any:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            result = inner(*given, **named)
            end.record()
            self._events.setdefault(name, []).append((begin, end))
            return result

        setattr(module, name, timed)

    def take(self) -> dict[str, float]:
        torch.cuda.synchronize()
        sums = {
            name: sum(a.elapsed_time(b) for a, b in pairs) / 1000
            for name, pairs in self._events.items()
        }
        self._events = {}
        return sums


def pinned_gb_per_s() -> float:
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device="cuda")
    seconds = []
    for _ in range(4):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for first in range(0, len(host), PIECE):
            there[first : first + PIECE].copy_(host[first : first + PIECE], non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return len(host) / statistics.median(seconds) / 1e9


@contextmanager
def model(options: argparse.Namespace) -> Any:
    whole = Shape.of_entry(options.model, model_entry(options.model))
    recipe = Recipe.of(whole, options.format)
    shape = whole.cut(
        dense_layers=1,
        moe_layers=options.layers,
        vocab=4096,
        **({"experts": options.experts} if options.experts else {}),
    )
    with tempfile.TemporaryDirectory(prefix="moechat-prefill-", dir=options.folder) as folder:
        began = time.perf_counter()
        write_model(Path(folder), shape, recipe, lambda done, of: None)
        print(f"written in {time.perf_counter() - began:.1f} s", flush=True)
        files = find_model_files(Path(folder))
        yield shape, files


def one_pass(
    files: Any, source: Any, tokens: int, chunk: int, spans: Spans, profile: bool = False
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Device time of each layer, and figures of the whole. Nothing waits between the layers."""
    spec = files.spec
    cache = KVCache(0, spec, "bf16")
    ids = np.random.default_rng(tokens).integers(0, spec.vocab_size, tokens).tolist()
    never, before = _native.CancelFlag(), source.statistics()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(spec.num_layers + 1)]
    torch.cuda.synchronize()
    began = time.perf_counter()
    marks[0].record()
    with torch.profiler.profile() if profile else nullcontext() as profiler:
        span = stream_prefill.StreamPrefill(spec, source, cache, ids, chunk_tokens=chunk)
        for layer in range(spec.num_layers):
            output = span.run_layer(never, 0)
            assert output is not None
            marks[layer + 1].record()
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    if profiler is not None:
        print(profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=40))
    after = source.statistics()
    assert span.hidden_TD.shape == (tokens, spec.hidden_size)
    layers = [
        {"layer": layer, "ms": first.elapsed_time(last)}
        for layer, (first, last) in enumerate(pairwise(marks))
    ]
    moe = spec.num_layers - 1
    whole = {
        "pass_seconds": seconds,
        "stall_ms_a_layer": 1000 * (after.stall_seconds - before.stall_seconds) / moe,
        "copied_gb": (after.copied_bytes - before.copied_bytes) / 1e9,
        "copy_seconds": after.copy_seconds - before.copy_seconds,
    }
    return layers, whole | spans.take()


def attention_width(g: dict[str, Any]) -> int:
    """Multiplications a head, query and key."""
    return int(g["qk_nope_head_dim"] + g["qk_rope_head_dim"] + g["v_head_dim"])


class Run:
    """Prompts through one model with one set of settings."""

    def __init__(self, options: argparse.Namespace, shape: Shape, files: Any, spans: Spans) -> None:
        self.options, self.shape, self.files, self.spans = options, shape, files, spans
        g = shape.geometry
        # 256 FP8 experts' codes and scales.
        self.expert_bytes = 3 * g["hidden_size"] * g["moe_intermediate_size"] * (1 + 4 / 128**2)

    def measure(self, memory_gb: float) -> list[dict[str, Any]]:
        """Rows; with ``memory_gb`` the process gets no more, and no matrix stays on the device."""
        options = self.options
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        fraction = memory_gb * 1e9 / total if memory_gb else 1.0
        torch.cuda.set_per_process_memory_fraction(fraction)
        settings = StreamSettings(
            group_bytes=int(options.group_experts * self.expert_bytes) + 4096,
            num_slots=options.capped_slots if memory_gb else options.slots,
            resident_bytes=0 if memory_gb else None,
        )
        source = StreamedSource(
            self.files.spec,
            self.files.bind(),
            device="cuda",
            compute=options.compute,
            settings=settings,
        )
        rows = []
        for tokens in (int(text) for text in options.tokens.split(",")):
            for number in range(options.passes):
                row = self.row(source, tokens, number) | {"gpu_memory_gb": memory_gb}
                rows.append(row)
                shown = {k: round(v, 3) for k, v in row.items() if k != "layers"}
                print(json.dumps(shown), flush=True)
        print(source.statistics())
        source.close()
        return rows

    def row(self, source: StreamedSource, tokens: int, number: int) -> dict[str, Any]:
        options, g = self.options, self.shape.geometry
        torch.cuda.reset_peak_memory_stats()
        pinned = pinned_gb_per_s()
        profile = options.profile and number == options.passes - 1
        layers, sums = one_pass(self.files, source, tokens, options.chunk, self.spans, profile)
        # The first one's weights came while the dense layer computed, and while the last one
        # computes no others come.
        ms = statistics.median(row["ms"] for row in layers[2:-1])
        moe, dense = len(layers) - 1, layers[0]["ms"]
        attend = 1000 * sums["attend"] / len(layers)
        expert = 1000 * sums["add_experts"] / moe
        attention_tflop = g["num_heads"] * attention_width(g) * tokens * tokens / 1e12
        pairs = tokens * g["num_experts_per_token"]
        experts_tflop = 6 * g["hidden_size"] * g["moe_intermediate_size"] * pairs / 1e12
        # The dense layer's time has the embedding in it, which comes once.
        whole_s = (3 * dense + 58 * ms) / 1000
        rate = self.shape.experts * self.expert_bytes / ms / 1e6
        return {
            "tokens": tokens,
            "pass": number,
            "moe_layer_ms": ms,
            "dense_layer_ms": dense,
            "stall_ms": sums["stall_ms_a_layer"],
            "stream_gb_per_s": rate,
            "copies_gb_per_s": sums["copied_gb"] / sums["copy_seconds"],
            "pinned_gb_per_s": pinned,
            "of_pinned": rate / pinned,
            "attend_ms": attend,
            "attention_tflop_per_s": attention_tflop / attend * 1000,
            "experts_ms": expert,
            "experts_tflop_per_s": experts_tflop / expert * 1000,
            "pass_seconds": sums["pass_seconds"],
            "whole_seconds": whole_s,
            "whole_tokens_per_s": tokens / whole_s,
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
            "layers": layers,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="deepseek-v3")
    parser.add_argument("--format", default=None)
    parser.add_argument("--layers", type=int, default=5, help="with experts, 3 at least")
    parser.add_argument("--experts", type=int, default=None)
    parser.add_argument("--tokens", default="2048,8192,16384,32768")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--group-experts", type=int, default=32)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--capped-slots", type=int, default=6)
    parser.add_argument("--gpu-memory-gb", default="0", help="also several; 0: all")
    parser.add_argument("--compute", default="bf16")
    parser.add_argument("--profile", action="store_true", help="the last pass of every length")
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    spans = Spans()
    spans.wrap(layer_attention, "attend")
    spans.wrap(lane, "add_experts")
    report: dict[str, Any] = {"options": {k: str(v) for k, v in vars(options).items()}}
    with model(options) as (shape, files):
        run = Run(options, shape, files, spans)
        memory = [float(text) for text in options.gpu_memory_gb.split(",")]
        report["rows"] = [row for gb in memory for row in run.measure(gb)]
    if options.out:
        options.out.write_text(json.dumps(report))


if __name__ == "__main__":
    sys.exit(main())
