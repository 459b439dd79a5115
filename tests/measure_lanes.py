"""Streamed prefill over two GPUs, by hand: tests/measure_lanes.py. With one GPU both lanes use it.

The links alone and together; copies from GPU to GPU; oracle folders in one and two lanes, with peer
access and by way of the host; then layers of a model's real shapes (one is written, and stands for
all: weights are read from the same pages again), prefilled in one lane and in two: seconds a layer,
GB/s of each link beside that of page-locked copies on both in the same run. Needs torch, the native
module and the repository.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from oracles import expected, oracle_folder

from moechat import _native
from moechat.bench.settings import model_entry
from moechat.bench.synthetic.config import Shape
from moechat.bench.synthetic.folder import write_model
from moechat.bench.synthetic.tensors import Recipe
from moechat.engine.model_files import find_model_files
from moechat.kv.cache import KVCache
from moechat.prefill.gpu import lane as lane_module
from moechat.prefill.gpu.exchange import Exchange, mark, routes_between
from moechat.prefill.gpu.lanes import run_lanes
from moechat.prefill.gpu.plan import StreamSettings
from moechat.prefill.gpu.stream_prefill import StreamPrefill
from moechat.prefill.gpu.streamed_source import StreamedSource

PIECE = 8 << 20
NEVER = _native.CancelFlag()
FOLDERS = ("deepseek_v3_bf16", "deepseek_v3_fp8_256", "gpt_oss_mxfp4", "olmoe", "gemma3_text")
Devices = list[torch.device]


def synchronise(devices: Devices) -> None:
    for device in {device for device in devices if device.type == "cuda"}:
        torch.cuda.synchronize(device)


def pinned_rates(devices: Devices, size: int) -> list[float]:
    """GB/s of each device's link, all copying at once from page-locked memory, in 8 MB pieces."""
    host = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in devices]
    there = [torch.empty(size, dtype=torch.uint8, device=device) for device in devices]
    streams = [torch.cuda.Stream(device) for device in devices]
    rates = []
    for _ in range(4):
        synchronise(devices)
        marks = []
        for stream in streams:
            marks.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
            marks[-1][0].record(stream)
        for begin in range(0, size, PIECE):
            for number, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    piece = host[number][begin : begin + PIECE]
                    there[number][begin : begin + PIECE].copy_(piece, non_blocking=True)
        for (_, last), stream in zip(marks, streams):
            last.record(stream)
        synchronise(devices)
        rates.append([size / first.elapsed_time(last) / 1e6 for first, last in marks])
    return [statistics.median(each) for each in zip(*rates)]


def exchange_rates(devices: Devices, size: int, peer_access: bool) -> list[float]:
    """GB/s into each device from the other, both ways at once."""
    exchange = Exchange(devices, routes_between(devices, peer_access=peer_access))
    made = [torch.full((size,), 5 + i, dtype=torch.uint8, device=d) for i, d in enumerate(devices)]
    there = [torch.zeros_like(tensor) for tensor in made]
    rates = []
    for _ in range(3):
        synchronise(devices)
        began = time.perf_counter()

        def task(lane: int) -> None:
            exchange.offer(lane, "x", made[lane])
            done = exchange.fetch(lane, 1 - lane, "x", slice(0, size), there[lane])
            exchange.arrived(lane, done)

        run_lanes([lambda: task(0), lambda: task(1)], exchange.stop)
        synchronise(devices)
        rates.append(size / (time.perf_counter() - began) / 1e9)
        exchange.end_layer()
    for lane, tensor in enumerate(there):
        assert bool((tensor == 5 + 1 - lane).all()), "the exchange lost bytes"
    return rates


def sources_of(
    spec: Any, tensors: Any, devices: Devices, compute: str, settings: StreamSettings
) -> list[StreamedSource]:
    count = spec.moe.num_experts if spec.moe else 0
    bounds = [count * lane // len(devices) for lane in range(len(devices) + 1)]
    return [
        StreamedSource(
            spec, tensors, device=device, compute=compute, settings=settings,
            **({"experts": slice(bounds[lane], bounds[lane + 1])} if len(devices) > 1 else {}),
        )
        for lane, device in enumerate(devices)
    ]  # fmt: skip


def oracle_check(name: str, devices: Devices) -> str:
    """One lane and two, peer access and host, the same and different devices."""
    results = []
    for compute in ("exact", "bf16"):
        files = find_model_files(oracle_folder(name))
        spec, tensors = files.spec, list(files.bind())
        want = expected(oracle_folder(name))
        logits, hidden = {}, {}
        for label, used, peer in (
            ("one", devices[:1], True),
            ("two, peer", devices, True),
            ("two, host", devices, False),
            ("two, again", devices, True),
            ("two, same GPU", devices[:1] * 2, True),
        ):
            sources = sources_of(spec, tensors, used, compute, StreamSettings(num_slots=2))
            for ids in (
                want["prompt_1_ids"].tolist(),
                (want["prompt_1_ids"].tolist() * 1500)[:1500],
            ):
                cache = KVCache(0, spec, compute)
                routes = routes_between(used, peer_access=peer)
                span = StreamPrefill(spec, sources, cache, ids, routes=routes)
                rows = [span.run_layer(NEVER, 16) for _ in range(spec.num_layers)]
                assert all(len(row.kv_TW) == len(ids) for row in rows)
                logits[label, len(ids)] = span.logits(NEVER, 0)
                hidden[label, len(ids)] = span.hidden_TD
            for source in sources:
                source.close()
        short = len(want["prompt_1_ids"])
        errors = [np.abs(logits[label, short] - want["all_logits"]).max() for label in
                  ("one", "two, peer")]  # fmt: skip
        wrong = compute == "exact" and max(errors) > 1e-3
        results.append(
            f"{compute}: off transformers' by {errors[0]:.1e} in one lane, {errors[1]:.1e} in two"
            + (" WRONG" if wrong else "")
        )
        for label in ("two, host", "two, again", "two, same GPU"):
            for size in (short, 1500):
                same = np.array_equal(
                    hidden[label, size].view(np.int32), hidden["two, peer", size].view(np.int32)
                )
                if not same:
                    results.append(f"{compute} BITS DIFFER: {label}, {size} tokens")
    return "; ".join(results)


def layered(files: Any, layers: int) -> tuple[Any, list[Any]]:
    """The model's last layer that many times: spec and tensors."""
    spec = files.spec
    last = f"layers.{spec.num_layers - 1}."
    tensors = []
    for bound in files.bind():
        role = bound.spec.role
        if not re.match(r"layers\.\d+\.", role):
            tensors.append(bound)
        elif role.startswith(last):
            for layer in range(layers):
                new = f"layers.{layer}." + role[len(last) :]
                tensors.append(
                    dataclasses.replace(bound, spec=dataclasses.replace(bound.spec, role=new))
                )
    return dataclasses.replace(spec, layers=spec.layers[-1:] * layers), tensors


def one_pass(
    spec: Any, sources: list[StreamedSource], ids: list[int], peer_access: bool
) -> tuple[dict[str, Any], np.ndarray]:
    devices = [source.device for source in sources]
    cuda = [device for device in devices if device.type == "cuda"]
    for device in cuda:
        torch.cuda.reset_peak_memory_stats(device)
    cache = KVCache(0, spec, "bf16")
    routes = routes_between(devices, peer_access=peer_access)
    span = StreamPrefill(spec, sources, cache, ids, routes=routes)
    before = [source.statistics() for source in sources]
    synchronise(devices)
    began = time.perf_counter()
    returned, marks = [], []
    for _ in range(spec.num_layers):
        span.run_layer(NEVER)
        returned.append(time.perf_counter() - began)
        marks.append([timed_mark(device) for device in devices])
    synchronise(devices)
    seconds = time.perf_counter() - began
    host = CLOCK.take()
    after = [source.statistics() for source in sources]
    between = [
        first[lane].elapsed_time(last[lane]) / 1000
        for first, last in itertools.pairwise(marks)
        for lane, device in enumerate(devices)
        if device.type == "cuda"
    ]
    copied = [now.copied_bytes - was.copied_bytes for was, now in zip(before, after)]
    copying = [now.copy_seconds - was.copy_seconds for was, now in zip(before, after)]
    figures = {
        "seconds": seconds,
        "layer_seconds": seconds / spec.num_layers,
        "middle_layer_seconds": statistics.median(between) if between else 0.0,
        "first_return_seconds": returned[0],
        "last_return_seconds": returned[-1],
        "host_layer_seconds": host,
        "link_gb_per_s": [size / seconds / 1e9 for size in copied],
        "copies_gb_per_s": [size / max(took, 1e-9) / 1e9 for size, took in zip(copied, copying)],
        "stall_seconds": [n.stall_seconds - w.stall_seconds for w, n in zip(before, after)],
        "staged_gb": [(n.staged_bytes - w.staged_bytes) / 1e9 for w, n in zip(before, after)],
        "peak_gb": [torch.cuda.max_memory_allocated(device) / 1e9 for device in cuda],
    }
    return figures, span.hidden_TD


def exchanged_bytes(spec: Any, num_tokens: int, lanes: int) -> int:
    """What comes into all lanes in a layer: inputs, slots, choices and weights, and branches."""
    each = 2 * spec.hidden_size + 2 * spec.kv_width + 12 * spec.moe.num_experts_per_token
    each += 4 * spec.hidden_size
    return num_tokens * (lanes - 1) * each


class HostClock:
    """Seconds that the lanes' threads take for a layer without what they wait for, by thread."""

    def __init__(self) -> None:
        self.busy: dict[int, list[float]] = {}
        self.waited = threading.local()
        self._wrap(lane_module, "group_tokens")
        self._wrap(StreamedSource, "_take")
        self._wrap(Exchange, "fetch")
        run_layer = lane_module.Lane.run_layer

        def timed(lane: Any, *given: Any) -> Any:
            self.waited.seconds = 0.0
            began = time.perf_counter()
            output = run_layer(lane, *given)
            busy = time.perf_counter() - began - self.waited.seconds
            self.busy.setdefault(lane.number, []).append(busy)
            return output

        lane_module.Lane.run_layer = timed  # type: ignore[method-assign]

    def _wrap(self, owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def timed(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = inner(*given, **named)
            self.waited.seconds = getattr(self.waited, "seconds", 0.0) + time.perf_counter() - began
            return result

        setattr(owner, name, timed)

    def take(self) -> list[float]:
        """The median of the layers since the last call, of each lane."""
        found = [statistics.median(seconds) for _, seconds in sorted(self.busy.items())]
        self.busy = {}
        return found


CLOCK = HostClock()


def timed_mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return mark(device)
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def text_of(figures: dict[str, Any]) -> str:
    def one(value: Any) -> str:
        return "+".join(f"{x:.3f}" for x in value) if isinstance(value, list) else f"{value:.3f}"

    return " ".join(f"{name} {one(value)}" for name, value in figures.items())


def measure_model(files: Any, devices: Devices, options: argparse.Namespace, g: Any) -> None:
    spec, tensors = layered(files, options.layers)
    one_expert = 3 * g["hidden_size"] * g["moe_intermediate_size"] * 1.0003
    settings = StreamSettings(
        group_bytes=int(options.group_experts * one_expert) + 1, num_slots=options.slots
    )
    hidden: dict[tuple[int, str], np.ndarray] = {}
    for label, used, peers in (("one lane", devices[:1], [True]), ("two", devices, [True, False])):
        sources = sources_of(spec, tensors, used, "bf16", settings)
        for tokens in (int(text) for text in options.tokens.split(",")):
            ids = np.random.default_rng(tokens).integers(0, spec.vocab_size, tokens).tolist()
            for peer in peers:
                name = label if len(peers) == 1 else f"{label}, {'peer' if peer else 'host'}"
                for number in range(options.passes):
                    pinned = []
                    if devices[0].type == "cuda":
                        pinned = pinned_rates(list(dict.fromkeys(used)), 1 << 30)
                    figures, hidden[tokens, name] = one_pass(spec, sources, ids, peer)
                    text = f"{name}, {tokens} tokens, pass {number}: {text_of(figures)}"
                    if pinned:
                        weights = sum(figures["link_gb_per_s"])
                        more = exchanged_bytes(spec, tokens, len(used)) * spec.num_layers
                        all_ = weights + more / figures["seconds"] / 1e9
                        text += f"; pinned {'+'.join(f'{x:.1f}' for x in pinned)} GB/s, weights "
                        text += f"{weights / sum(pinned):.3f} of it"
                        if more and not peer:
                            text += f", with what lanes exchange {all_ / sum(pinned):.3f}"
                    print(text, flush=True)
        for source in sources:
            source.close()
    for tokens in {tokens for tokens, _ in hidden}:
        base, peer, host = (hidden[tokens, n] for n in ("one lane", "two, peer", "two, host"))
        rms = float(np.sqrt(np.mean((peer - base) ** 2) / np.mean(base**2)))
        same = np.array_equal(peer.view(np.int32), host.view(np.int32))
        print(
            f"{tokens} tokens: two lanes off one by {rms:.2e} of the rms; peer and host bits "
            f"{'equal' if same else 'DIFFER'}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="cpu: torch's CPU device, to try it")
    parser.add_argument("--model", default="deepseek-v3")
    parser.add_argument("--format", default=None)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--experts", type=int, default=None)
    parser.add_argument("--tokens", default="8192,32768")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--group-experts", type=int, default=16)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--skip-oracles", action="store_true")
    parser.add_argument("--skip-model", action="store_true")
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    if options.device == "cpu":
        devices = [torch.device("cpu")] * 2
    else:
        count = torch.cuda.device_count()
        devices = [torch.device("cuda", min(lane, count - 1)) for lane in range(2)]
        print(f"{count} GPUs, lanes on {devices}, peer access "
              f"{count > 1 and torch.cuda.can_device_access_peer(*devices)}")  # fmt: skip
        for used in ([devices[0]], [devices[1]], list(dict.fromkeys(devices))):
            rates = " ".join(f"{rate:.1f}" for rate in pinned_rates(used, 2 << 30))
            print(f"page-locked copies to {[str(d) for d in used]} at once: {rates} GB/s")
        if count > 1:
            for peer in (True, False):
                rates = " ".join(f"{r:.1f}" for r in exchange_rates(devices, 1 << 29, peer))
                print(f"from GPU to GPU, both ways, {'peer' if peer else 'host'}: {rates} GB/s")
    if not options.skip_oracles:
        for name in FOLDERS:
            try:
                print(f"{name}: {oracle_check(name, devices)}", flush=True)
            except Exception as error:
                print(f"{name}: FAILED {type(error).__name__}: {error}"[:1000], flush=True)
    if options.skip_model:
        return
    whole = Shape.of_entry(options.model, model_entry(options.model))
    shape = whole.cut(
        dense_layers=0, moe_layers=1, vocab=4096,
        **({"experts": options.experts} if options.experts else {}),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="moechat-lanes-", dir=options.folder) as folder:
        began = time.perf_counter()
        recipe = Recipe.of(whole, options.format)
        write_model(Path(folder), shape, recipe, lambda done, of: None)
        print(f"written in {time.perf_counter() - began:.1f} s", flush=True)
        measure_model(find_model_files(Path(folder)), devices, options, shape.geometry)


if __name__ == "__main__":
    main()
