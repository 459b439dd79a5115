"""Time and values of decode's kernels on a GPU: ``python tests/measure_decode_ops.py``.

At DeepSeek-V3's shapes: each operation and the whole chain of a layer, in CUDA graphs, beside what
plain torch gives for them; then the mailbox with a thread that answers at once, and with none.
Needs torch, numpy and the repository; no native module.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from moechat.decode.gpu import ops, plain_ops
from moechat.gpu_weights.weight import Fp8Matrix

sys.path.insert(0, str(Path(__file__).parent / "decode_gpu"))
from measured_layer import (
    CHOSEN,
    DEVICE,
    EXPERTS,
    HEADS,
    MOE,
    SHARED,
    SIZES,
    SPEC,
    Layer,
    Step,
    check,
    failures,
    graph_of,
    microseconds,
)  # fmt: skip


def values(layer: Layer, rows: int) -> None:
    random = torch.Generator(device=DEVICE).manual_seed(rows)
    for name, weight, exact in (
        ("inputs", layer.inputs, False), ("q_b", layer.q_b, False), ("o", layer.o, False),
        ("router", layer.router, True),
    ):  # fmt: skip
        inputs = weight.shape[1] if isinstance(weight, torch.Tensor) else weight.codes.shape[1]
        x = torch.randn(rows, inputs, generator=random, device=DEVICE)
        norm = ops.Norm(torch.rand(inputs, generator=random, device=DEVICE) + 0.5, 1e-6)
        norm = None if name == "o" else norm
        got = ops.linear(x, weight, norm=norm, exact=exact)
        want = plain_ops.linear(x, weight, norm=norm, exact=True)
        check(f"linear {name} R={rows}", got, want, 1e-5 if exact else 4e-4)
        if torch.equal(got, want):
            failures.append(f"the same function was compared: {name}")
        same_alone(name, got, ops.linear(x[:1], weight, norm=norm, exact=exact))
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)[:, None].repeat(1, 16)
    every = Fp8Matrix(codes, torch.full((2, 1), 0.5, device=DEVICE), (128, 128))
    one = torch.eye(16, device=DEVICE)[:1]
    got = ops.linear(one, every)[0].nan_to_num(-1e9)
    check("all codes", got, (every.to_dense(torch.float32)[:, 0]).nan_to_num(-1e9), 0)
    x = torch.randn(rows, 2 * SHARED, generator=random, device=DEVICE)
    got = ops.linear(x, layer.down, gated=SPEC)
    want = plain_ops.linear(x, layer.down, gated=SPEC, exact=True)
    check(f"gated down R={rows}", got, want, 4e-4)
    logits = torch.randn(rows, EXPERTS, generator=random, device=DEVICE)
    ids, weights = ops.route(MOE, logits, layer.correction)
    want_ids, want_weights = plain_ops.route(MOE, logits, layer.correction)
    check(f"route ids R={rows}", ids, want_ids, 0)
    check(f"route weights R={rows}", weights, want_weights, 1e-6)


def same_alone(name: str, together: torch.Tensor, alone: torch.Tensor) -> None:
    same = torch.equal(together[:1], alone)
    print(f"  first row bitwise the same alone: {same}")
    if not same:
        failures.append(f"rows of {name}")


def attention_values(layer: Layer, rows: int, slots: int) -> None:
    step = Step(rows, slots, 5)
    random = torch.Generator(device=DEVICE).manual_seed(slots)
    query = torch.randn(rows, HEADS * 192, generator=random, device=DEVICE)
    kv = torch.randn(rows, SIZES.kv_width, generator=random, device=DEVICE)
    got, new = step.attend(layer, query, kv)
    written = step.slots.slots_SCW[torch.arange(rows), slots].clone()
    want, want_new = plain_ops.latent_attention(
        SPEC, SIZES, query, kv, layer.kv_norm, step.cos, step.sin, True, layer.kv_b, step.slots
    )
    check(f"attention R={rows} n={slots}", got, want, 1e-2)
    check(f"new slots R={rows}", new, want_new, 1e-4)
    check(f"slots in the cache R={rows}", written, want_new, 1e-4)
    alone = Step(rows, slots, 5)
    for name in ("slab_R", "begin_R", "own_R"):
        object.__setattr__(alone.slots, name, getattr(alone.slots, name)[:1].clone())
    alone.cos, alone.sin = alone.cos[:1], alone.sin[:1]
    same_alone("attention", got, alone.attend(layer, query[:1], kv[:1])[0])


def timings(layers: list[Layer], rows: int, slots: int, only: str) -> None:
    """Over distinct layers, so that weights come from memory and not from a cache."""
    step = Step(rows, slots, 7)
    query = torch.randn(rows, HEADS * 192, device=DEVICE)
    kv = torch.randn(rows, SIZES.kv_width, device=DEVICE)
    attended = torch.randn(rows, HEADS * 128, device=DEVICE)
    latent = torch.randn(rows, SIZES.q_lora_rank, device=DEVICE)
    norm = ops.Norm
    units: dict[str, tuple[Callable[[Layer], object], int]] = {
        "qkv_a": (step.attention_inputs, layers[0].inputs.codes.numel()),
        "q_b": (
            lambda e: ops.linear(latent, e.q_b, norm=norm(e.q_norm, 1e-6), work=step.work),
            layers[0].q_b.codes.numel(),
        ),
        "attention": (
            lambda e: step.attend(e, query, kv),
            layers[0].kv_b.codes.numel() + rows * slots * SIZES.kv_width * 2,
        ),
        "o": (
            lambda e: ops.linear(attended, e.o, add=step.x, out=step.x, work=step.work),
            layers[0].o.codes.numel(),
        ),
        "router": (
            lambda e: ops.linear(
                step.x, e.router, norm=norm(e.ffn_norm, 1e-6), exact=True, work=step.work
            ),
            layers[0].router.numel() * 2,
        ),
        "router+route+post": (step.post, 0),
        "shared": (step.shared, layers[0].gate_up.codes.numel() + layers[0].down.codes.numel()),
        "all of attention": (step.attention, layers[0].attention_bytes()),
        "attention+post": (lambda e: (step.attention(e), step.post(e)), 0),
        "attention+post+shared": (
            lambda e: (step.attention(e), step.post(e), step.shared(e)),
            0,
        ),
    }
    for name, (unit, num_bytes) in units.items():
        if only not in name:
            continue
        try:
            graph = graph_of(lambda unit=unit: [unit(layer) for layer in layers])
            spent = microseconds(graph, len(layers))
        except Exception:
            traceback.print_exc(limit=3)
            failures.append(f"time of {name}")
            continue
        rate = f" {num_bytes / spent / 1e6:.2f} TB/s" if num_bytes else ""
        print(f"time R={rows} n={slots} {name}: {spent:.1f} us{rate}", flush=True)


def captured_unanswered(step: Step, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Warmed up without a server: posts and waits return at once."""
    step.box.error.fill_(1)
    graph = graph_of(work)
    step.box.reset()
    return graph


def mailbox(layer: Layer, rows: int) -> None:
    step, repeats = Step(rows, 64, 9), 100
    box = step.box
    ids = torch.zeros((rows, CHOSEN), dtype=torch.int32, device=DEVICE)
    weights = torch.ones((rows, CHOSEN), device=DEVICE)
    normed = ops.Norm(layer.ffn_norm, 1e-6)

    def post() -> None:
        ops.post(step.x, ids, weights, box, norm=normed)

    def many(work: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(repeats):
                work()

        return run

    word = torch.zeros(1, device=DEVICE)
    for name, alone in (
        ("an empty kernel", lambda: word.add_(1)),
        ("post alone", post),
        ("answered wait", step.wait),
    ):  # fmt: skip
        graph = captured_unanswered(step, many(alone))
        print(f"mailbox R={rows} {name}: {microseconds(graph, repeats):.1f} us", flush=True)
    request, reply = box.request.numpy(), box.reply.numpy()
    for name, ask in (("post+wait", post), ("router+route+post+wait", lambda: step.post(layer))):
        graph = captured_unanswered(step, many(lambda ask=ask: (ask(), step.wait())))
        stop = threading.Event()
        box.y.zero_()

        def answer(stop: threading.Event = stop) -> None:
            while not stop.is_set():
                for _ in range(1000):
                    if request[0] != reply[0]:
                        reply[0] = request[0]

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            spent = microseconds(graph, repeats)
            print(f"mailbox R={rows} {name}: {spent:.1f} us, error {int(box.error)}", flush=True)
            if int(box.error) != 0:
                failures.append("mailbox error")
        finally:
            stop.set()
            thread.join()
    box.reset()
    box.y.fill_(3.0)
    before = step.x.clone()
    post()
    torch.cuda.synchronize()
    check(f"posted x R={rows}", box.x[:rows].cuda(), plain_ops.rms_norm(before, *normed), 1e-6)
    words = int(box.request), int(box.rows), box.weights[0, 0].item()
    if words != (1, rows, 1.0):
        failures.append(f"words {words}")
    box.reply.copy_(box.request)
    check(f"answer R={rows}", ops.wait(box, step.x), before + 3, 1e-6)


def whole_layers(layers: list[Layer], rows: int) -> None:
    """A layer with a server that takes 400 us: the GPU and the hand-over come on top."""
    step, delay_seconds = Step(rows, 1000, 9), 400e-6
    box = step.box

    def run() -> None:
        for layer in layers:
            step.attention(layer)
            step.post(layer)
            step.shared(layer)
            step.wait()

    request, reply = box.request.numpy(), box.reply.numpy()
    graph = captured_unanswered(step, run)
    stop = threading.Event()
    box.y.zero_()

    def answer(stop: threading.Event = stop) -> None:
        while not stop.is_set():
            for _ in range(1000):
                if request[0] != reply[0]:
                    end = time.perf_counter() + delay_seconds
                    while time.perf_counter() < end:
                        pass
                    reply[0] = request[0]

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        spent = microseconds(graph, len(layers)) - delay_seconds * 1e6
    finally:
        stop.set()
        thread.join()
    print(
        f"layer R={rows}: {spent:.1f} us beside the server,"
        f" error {int(box.error)}", flush=True,
    )  # fmt: skip


def giving_up(layer: Layer) -> None:
    step = Step(2, 64, 11)

    def ten() -> None:
        for _ in range(10):
            step.post(layer)
            step.wait()

    graph = captured_unanswered(step, ten)
    for name, abort, after in (("no answer", 0, 0.0), ("abort after 0.2 s", 1, 0.2)):
        step.box.reset()
        begin = time.perf_counter()
        graph.replay()
        if abort:
            time.sleep(after)
            step.box.abort.fill_(1)
        torch.cuda.synchronize()
        spent = time.perf_counter() - begin
        error, request = int(step.box.error), int(step.box.request)
        print(f"giving up, {name}: {spent:.3f} s, error {error}, requests {request}", flush=True)
        if error != (2 if abort else 1) or request != 1 or not after <= spent < 1.3:
            failures.append(f"giving up, {name}")


def unanswered(rows: int) -> None:
    step = Step(rows, 1, 1)
    step.box.error.fill_(1)
    step.wait()


def warm_jobs(layer: Layer) -> list[Callable[[], object]]:
    """Each compiles kernels, so that it takes less time beside others in processes of their own."""
    step = Step(3, 200, 1)
    step.box.error.fill_(1)
    query = torch.zeros(3, HEADS * 192, device=DEVICE)
    kv = torch.zeros(3, SIZES.kv_width, device=DEVICE)
    wide = torch.zeros(3, HEADS * 128, device=DEVICE)
    latent = torch.zeros(3, 2112, device=DEVICE)[:, :1536]
    inner = torch.zeros(3, 2 * SHARED, device=DEVICE)
    ids = torch.zeros((3, CHOSEN), dtype=torch.int32, device=DEVICE)
    return [
        lambda: step.attention_inputs(layer),
        lambda: ops.linear(latent, layer.q_b, norm=ops.Norm(layer.q_norm, 1e-6)),
        lambda: step.attend(layer, query, kv),
        lambda: ops.linear(wide, layer.o, add=step.x, out=step.x),
        lambda: ops.linear(wide, layer.o),
        lambda: step.post(layer),
        lambda: ops.linear(inner, layer.gate_up, norm=ops.Norm(layer.ffn_norm, 1e-6)),
        lambda: ops.linear(inner, layer.down, gated=SPEC),
        lambda: ops.linear(inner, layer.down, gated=SPEC, add=step.x),
        lambda: ops.post(step.x, ids, ids.float(), step.box, norm=ops.Norm(layer.ffn_norm, 1e-6)),
        lambda: [unanswered(rows) for rows in (1, 2, 3, 8)],
        lambda: ops.route(MOE, inner[:, :EXPERTS].contiguous(), layer.correction),
    ]


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--layers", type=int, default=8)
    arguments.add_argument("--parts", default="values,attention,time,layer,mailbox")
    arguments.add_argument("--warm", type=int, help="compile the kernels of one job, no more")
    chosen = arguments.parse_args()
    if chosen.warm is not None:
        warm_jobs(Layer(0))[chosen.warm]()
        return
    begin = time.perf_counter()
    commands = [["--warm", str(job)] for job in range(12)]
    warmers = [
        subprocess.Popen([sys.executable, __file__, *command], stdout=subprocess.DEVNULL)
        for command in commands
    ]
    for warmer in warmers:
        if warmer.wait(100) != 0:
            failures.append("a kernel does not compile")
    print(f"-- compiled in {time.perf_counter() - begin:.1f} s", flush=True)
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    layers = [Layer(seed) for seed in range(chosen.layers)]
    first = layers[0]
    parts: list[Callable[[], None]] = []
    if "values" in chosen.parts:
        parts.append(lambda: values(first, 3))
    if "attention" in chosen.parts:
        parts.append(lambda: attention_values(first, 3, 77))
        parts.append(lambda: attention_values(first, 2, 16000))
    if "time" in chosen.parts:
        for rows, slots, only in (
            (1, 1000, ""), (1, 16000, "attention"), (8, 1000, ""), (2, 1000, "+"),
        ):  # fmt: skip
            parts.append(lambda at=(rows, slots, only): timings(layers, *at))
    if "layer" in chosen.parts:
        parts.extend([lambda: whole_layers(layers, 1), lambda: whole_layers(layers, 2)])
    if "mailbox" in chosen.parts:
        parts.extend([lambda: mailbox(first, 1), lambda: mailbox(first, 8)])
        parts.append(lambda: giving_up(first))
    for part in parts:
        begin = time.perf_counter()
        try:
            part()
        except Exception:
            traceback.print_exc(limit=6)
            failures.append("exception")
        print(f"-- {time.perf_counter() - begin:.1f} s", flush=True)
    print("FAILED: " + ", ".join(failures) if failures else "ALL OK")


if __name__ == "__main__":
    main()
