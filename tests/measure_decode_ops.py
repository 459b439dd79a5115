"""Time and values of decode's kernels on a GPU: ``python tests/measure_decode_ops.py``.

At DeepSeek-V3's shapes: each operation and the whole chain of a layer, in CUDA graphs, beside what
plain torch gives for them; then the mailbox with a thread that answers at once, and with none.
Needs torch, numpy and the repository; no native module.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch

from moechat.decode.gpu import ops, plain_ops, triton_latent, triton_linear
from moechat.decode.gpu.weight_views import shape_of
from moechat.models.spec import LatentAttention, MoeSpec

sys.path.insert(0, str(Path(__file__).parent / "decode_gpu"))
from fp8_stand_in import Fp8Codes, random_fp8

HIDDEN, HEADS, EXPERTS, CHOSEN, SHARED = 7168, 128, 256, 8, 2048
SIZES = LatentAttention(
    q_lora_rank=1536, kv_lora_rank=512, nope_dim=128, rope_dim=64, v_dim=128, norm_eps=1e-6
)
MOE = MoeSpec(
    num_experts=EXPERTS, num_experts_per_token=CHOSEN, intermediate_size=SHARED,
    scoring="sigmoid", num_groups=8, num_groups_kept=4, normalise_weights=True, routed_scaling=2.5,
)  # fmt: skip
SPEC = SimpleNamespace(
    num_heads=HEADS, softmax_scale=192**-0.5, attention_softcap=0.0, rms_norm_eps=1e-6,
    activation="silu", activation_limit=0.0, activation_alpha=0.0,
)  # fmt: skip
DEVICE = torch.device("cuda")
failures: list[str] = []


def check(name: str, got: torch.Tensor, want: torch.Tensor, limit: float) -> None:
    error = ((got.double() - want.double()).norm() / want.double().norm()).item()
    word = "ok" if error <= limit else "WRONG"
    print(f"check {name}: relative error {error:.2e} (limit {limit:.0e}) {word}", flush=True)
    if not error <= limit:
        failures.append(name)


def graph_of(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
        work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def microseconds(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    """A unit of work; the graph holds ``repeats`` of them."""
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / repeats)
    return statistics.median(times)


class Layer:
    """Weights of one MoE layer but its routed experts."""

    def __init__(self, seed: int) -> None:
        random = torch.Generator(device=DEVICE).manual_seed(seed)
        block = (128, 128)
        rank, width = SIZES.kv_lora_rank, SIZES.kv_width

        def fp8(outputs: int, inputs: int) -> Fp8Codes:
            return random_fp8(outputs, inputs, block, random)

        def norm(size: int) -> torch.Tensor:
            return torch.rand(size, generator=random, device=DEVICE) + 0.5

        self.inputs = fp8(SIZES.q_lora_rank + width, HIDDEN)
        self.q_b = fp8(HEADS * 192, SIZES.q_lora_rank)
        self.kv_b = fp8(HEADS * 256, rank)
        self.o = fp8(HIDDEN, HEADS * 128)
        self.gate_up = fp8(2 * SHARED, HIDDEN)
        self.down = fp8(HIDDEN, SHARED)
        self.router = torch.randn(EXPERTS, HIDDEN, generator=random, device=DEVICE).bfloat16()
        self.router *= HIDDEN**-0.5
        self.correction = torch.randn(EXPERTS, generator=random, device=DEVICE) * 0.05
        self.attention_norm, self.ffn_norm = norm(HIDDEN), norm(HIDDEN)
        self.q_norm, self.kv_norm = norm(SIZES.q_lora_rank), norm(rank)

    def attention_bytes(self) -> int:
        return sum(w.codes.numel() for w in (self.inputs, self.q_b, self.kv_b, self.o))


class Step:
    """Buffers of a step of R rows whose caches hold ``slots`` slots."""

    def __init__(self, rows: int, slots: int, seed: int) -> None:
        random = torch.Generator(device=DEVICE).manual_seed(seed)
        self.rows = rows
        self.x = torch.randn(rows, HIDDEN, generator=random, device=DEVICE)
        shape = (rows, slots + 64, SIZES.kv_width)
        cache = torch.randn(shape, generator=random, device=DEVICE).bfloat16()
        own = torch.full((rows,), slots, dtype=torch.int32, device=DEVICE)
        self.slots = ops.Slots(
            cache, torch.arange(rows, dtype=torch.int32, device=DEVICE), torch.zeros_like(own), own
        )
        angle = torch.rand(rows, SIZES.rope_dim // 2, generator=random, device=DEVICE) * 6
        self.cos, self.sin = angle.cos(), angle.sin()
        self.work = ops.Workspace(DEVICE)
        self.box = ops.Mailbox.create(DEVICE, 16, HIDDEN, CHOSEN)
        self.box.num_rows.fill_(rows)

    def attention_inputs(self, layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
        joined = ops.linear(
            self.x, layer.inputs, norm=ops.Norm(layer.attention_norm, 1e-6), work=self.work
        )
        return joined[:, : SIZES.q_lora_rank], joined[:, SIZES.q_lora_rank :]

    def attention(self, layer: Layer) -> None:
        latent, kv = self.attention_inputs(layer)
        query = ops.linear(latent, layer.q_b, norm=ops.Norm(layer.q_norm, 1e-6), work=self.work)
        values, _ = self.attend(layer, query, kv)
        ops.linear(values, layer.o, add=self.x, out=self.x, work=self.work)

    def attend(
        self, layer: Layer, query: torch.Tensor, kv: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.latent_attention(
            SPEC, SIZES, query, kv, layer.kv_norm, self.cos, self.sin, True, layer.kv_b,
            self.slots, work=self.work,
        )  # fmt: skip

    def post(self, layer: Layer) -> None:
        norm = ops.Norm(layer.ffn_norm, 1e-6)
        logits = ops.linear(self.x, layer.router, norm=norm, exact=True, work=self.work)
        ops.route_and_post(MOE, logits, layer.correction, self.x, self.box, norm=norm)

    def shared(self, layer: Layer) -> None:
        norm = ops.Norm(layer.ffn_norm, 1e-6)
        inner = ops.linear(self.x, layer.gate_up, norm=norm, work=self.work)
        ops.linear(inner, layer.down, gated=SPEC, add=self.x, out=self.x, work=self.work)

    def wait(self) -> None:
        ops.wait(self.box, self.x, out=self.x)


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
    every = Fp8Codes(codes, torch.full((2, 1), 0.5, device=DEVICE), (128, 128))
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

    def run(ahead_bytes: int) -> None:
        for number, layer in enumerate(layers):
            step.attention(layer)
            step.post(layer)
            step.shared(layer)
            following = layers[(number + 1) % len(layers)]
            if ahead_bytes:
                ops.prefetch([following.inputs, following.q_b, following.kv_b], ahead_bytes)
            step.wait()

    request, reply = box.request.numpy(), box.reply.numpy()
    for ahead_bytes in (0, 15 << 20, 30 << 20, 45 << 20):
        graph = captured_unanswered(step, lambda ahead_bytes=ahead_bytes: run(ahead_bytes))
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
            f"layer R={rows} prefetch {ahead_bytes >> 20} MiB: {spent:.1f} us beside the server,"
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


def sweep_jobs(layers: list[Layer]) -> list[tuple[str, Callable[[], float]]]:
    """Many ways to cut up each product and attention; a job gives the microseconds of one."""
    jobs: list[tuple[str, Callable[[], float]]] = []
    random = torch.Generator(device=DEVICE).manual_seed(3)
    shapes: dict[str, tuple[Callable[[Layer], Fp8Codes], bool]] = {
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
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--layers", type=int, default=8)
    arguments.add_argument("--parts", default="values,attention,time,layer,mailbox,profile")
    arguments.add_argument("--sweep", action="store_true")
    arguments.add_argument("--share", type=int, help="of the sweep: compile its kernels, no more")
    arguments.add_argument("--warm", type=int, help="compile the kernels of one job, no more")
    chosen = arguments.parse_args()
    if chosen.warm is not None:
        warm_jobs(Layer(0))[chosen.warm]()
        return
    if chosen.share is not None:
        sweep([Layer(0)], slice(chosen.share, None, 14))
        return
    begin = time.perf_counter()
    commands = [["--warm", str(job)] for job in range(12)]
    if chosen.sweep:
        commands += [["--share", str(share)] for share in range(14)]
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
    if "profile" in chosen.parts:
        parts.append(lambda: profile(layers))
    if chosen.sweep:
        parts.append(lambda: sweep(layers, slice(None)))
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
