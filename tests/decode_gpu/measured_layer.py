"""DeepSeek-V3's shapes for measurements of decode: a layer's weights, a step's buffers."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from types import SimpleNamespace

import torch
from random_fp8 import random_fp8

from moechat.decode.gpu import ops
from moechat.gpu_weights.weight import Fp8Matrix
from moechat.models.spec import LatentAttention, MoeSpec

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

        def fp8(outputs: int, inputs: int) -> Fp8Matrix:
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
            self.slots,
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
