"""Products on a GPU at DeepSeek-V3's shapes, run by hand: ``python tests/measure_products.py``.

TFLOP/s of dense and grouped products and of attention; errors against float64 of a few rows; and
whether bits depend on tiles, groups or what shares a product. ``--sweep`` tries other tilings.
Needs torch for CUDA, numpy and the repository; no native module.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from moechat.gpu_weights import triton_gemm
from moechat.gpu_weights.inputs import Quantised, quantise
from moechat.gpu_weights.products import product
from moechat.gpu_weights.triton_gemm import Tiling, gemm, inputs_of, linear, tile_list
from moechat.gpu_weights.weight import Fp8Matrix
from moechat.prefill.gpu.attention import AttentionRule, attend
from moechat.prefill.gpu.experts import add_experts, group_tokens
from moechat.prefill.gpu.host_copy import HostCopies
from moechat.prefill.gpu.source import ExpertGroup

HIDDEN, WIDTH, EXPERTS, GROUP, CHOSEN = 7168, 2048, 256, 32, 8
DENSE = ((7168, 1536), (1536, 24576), (512, 32768), (16384, 7168), (7168, 18432))
CUDA = torch.device("cuda")
SWEEPS = {
    ("fp8", 64): [Tiling(64, 64, 128, 4, 3), Tiling(64, 128, 128, 4, 3), Tiling(64, 64, 128, 4, 4)],
    ("fp8", 128): [
        Tiling(128, 64, 128, 4, 3), Tiling(128, 64, 128, 4, 2), Tiling(128, 64, 64, 4, 3),
        Tiling(128, 64, 64, 4, 4), Tiling(128, 128, 128, 8, 3), Tiling(128, 128, 64, 8, 3),
        Tiling(256, 64, 128, 8, 3), Tiling(256, 64, 64, 8, 4), Tiling(64, 128, 128, 4, 3),
        Tiling(64, 64, 128, 4, 3),
    ],
    ("bf16", 64): [Tiling(64, 128, 64, 4, 4), Tiling(64, 256, 64, 8, 4)],
    ("bf16", 128): [
        Tiling(128, 256, 64, 8, 4), Tiling(256, 128, 64, 8, 4), Tiling(128, 128, 64, 4, 4),
        Tiling(128, 128, 64, 8, 4),
    ],
}  # fmt: skip
SPEC: Any = SimpleNamespace(activation="silu", activation_limit=0.0, activation_alpha=0.0)


def milliseconds(call: Callable[[], object], times: int = 7) -> float:
    """Median, after two calls that do not count."""
    call(), call()
    found = []
    for _ in range(times):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        last.synchronize()
        found.append(first.elapsed_time(last))
    return statistics.median(found)


def random_weight(shape: tuple[int, ...]) -> Fp8Matrix:
    """Random codes and scales of blocks of 128; values are about 1."""
    codes = (torch.randn(shape, device=CUDA) * 50).clamp(-448, 448).to(torch.float8_e4m3fn)
    grid = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    scale = torch.rand(grid, device=CUDA) / 25
    return Fp8Matrix(codes.view(torch.uint8), scale, (128, 128))


def error(found: torch.Tensor, x: torch.Tensor, weight: Fp8Matrix) -> float:
    """Largest, by the largest value of float64; of some rows."""
    some = torch.linspace(0, len(x) - 1, 64, device=CUDA).long()
    exact = x[some].double() @ weight.to_dense(torch.float32).double().T
    return float((found[some].double() - exact).abs().max() / exact.abs().max())


def dense(rows: int) -> None:
    for inputs, outputs in DENSE:
        weight = random_weight((outputs, inputs))
        x = torch.randn((rows, inputs), device=CUDA).bfloat16()
        found = linear(x, weight)
        assert found is not None
        same = all(
            bool((linear(x[b:e], weight) == found[b:e]).all())
            for b, e in ((0, 1), (100, 357), (rows - 77, rows))
        )
        ms = milliseconds(functools.partial(linear, x, weight))
        decoded = weight.to_dense(torch.bfloat16)
        blas = milliseconds(functools.partial(product, x, decoded))
        flop = 2.0 * rows * inputs * outputs
        print(
            f"dense {rows} x {inputs} -> {outputs}: {flop / ms / 1e9:.0f} TFLOP/s ({ms:.3f} ms), "
            f"cuBLAS BF16 {flop / blas / 1e9:.0f}; error {error(found, x, weight):.1e} (BF16 "
            f"{error(product(x, decoded), x, weight):.1e}); bits of parts {same}",
            flush=True,
        )


def grouped(each: int) -> None:
    for inputs, outputs in ((HIDDEN, WIDTH), (WIDTH, HIDDEN)):
        weight = random_weight((GROUP, outputs, inputs))
        tokens = torch.randint(0, 8 * each, (GROUP * each,), device=CUDA)
        x = torch.randn((8 * each, inputs), device=CUDA).bfloat16()
        bounds = list(range(0, GROUP * each + 1, each))
        flop = 2.0 * GROUP * each * inputs * outputs
        out = torch.empty((GROUP * each, outputs), device=CUDA)

        def run(
            how: Tiling, matrix: Any = weight, out: torch.Tensor = out,
            x: Any = x, tokens: torch.Tensor = tokens, bounds: list[int] = bounds,
        ) -> torch.Tensor:  # fmt: skip
            tiles = tile_list(bounds, how.rows, CUDA)
            return gemm(x, matrix, tiles, how, out, tokens_R=tokens)

        halves = inputs_of(weight, x)
        how = triton_gemm.tiling(weight, each)
        assert how is not None
        run(how, x=halves)
        last = slice((GROUP - 1) * each, GROUP * each)
        wrong = error(out[last], x[tokens[last]], weight[GROUP - 1])
        first = out.clone()
        other = triton_gemm.tiling(weight, 64 if how.rows > 64 else 1000)
        assert other is not None
        same = bool((run(other, x=halves) == first).all())
        ms = milliseconds(functools.partial(run, how, x=halves))
        before = milliseconds(functools.partial(inputs_of, weight, x))
        decoded = weight.to_dense(torch.bfloat16)
        wide = triton_gemm.tiling(decoded, each)
        assert wide is not None
        bf16 = milliseconds(functools.partial(run, wide, decoded))
        print(
            f"grouped {GROUP} x {each} rows, {inputs} -> {outputs}: {flop / ms / 1e9:.0f} TFLOP/s "
            f"({ms:.3f} ms, inputs {before:.3f}), BF16 weights {flop / bf16 / 1e9:.0f}; error "
            f"{wrong:.1e}; bits of both tilings {same}",
            flush=True,
        )


def quantised(each: int) -> None:
    """Mode w8a8: codes times codes, and whether codes on the device are those of the definition."""
    weight = dataclasses.replace(random_weight((GROUP, WIDTH, HIDDEN)), quantised_inputs=True)
    x = torch.randn((8 * each, HIDDEN), device=CUDA).bfloat16()
    tokens = torch.randint(0, 8 * each, (GROUP * each,), device=CUDA)
    how = triton_gemm.tiling(weight, each)
    assert how is not None
    tiles = tile_list(list(range(0, GROUP * each + 1, each)), how.rows, CUDA)
    out = torch.empty((GROUP * each, WIDTH), device=CUDA)
    codes, definition = inputs_of(weight, x), quantise(x)
    assert isinstance(codes, Quantised)
    other = codes.values.view(torch.uint8) != definition.values.view(torch.uint8)
    other_scale = int((codes.scale != definition.scale).sum())
    call = functools.partial(gemm, codes, weight, tiles, how, out, tokens_R=tokens)
    ms = milliseconds(call)
    dense = definition.to_dense()[tokens[:each]]
    flop = 2.0 * GROUP * each * HIDDEN * WIDTH
    print(
        f"w8a8 {GROUP} x {each} rows: {flop / ms / 1e9:.0f} TFLOP/s, inputs "
        f"{milliseconds(functools.partial(inputs_of, weight, x)):.3f} ms; error "
        f"{error(out[:each], dense, weight[0]):.1e}; codes not as defined {int(other.sum())} of "
        f"{other.numel()}, scales {other_scale}",
        flush=True,
    )


def sweep(each: int, inputs: int, outputs: int) -> None:
    """Other tilings, of FP8 and of BF16 weights."""
    weight = random_weight((GROUP, outputs, inputs))
    x = torch.randn((8 * each, inputs), device=CUDA).bfloat16()
    tokens = torch.randint(0, 8 * each, (GROUP * each,), device=CUDA)
    out = torch.empty((GROUP * each, outputs), device=CUDA)
    bounds = list(range(0, GROUP * each + 1, each))
    flop = 2.0 * GROUP * each * inputs * outputs
    for kind, matrix in (("fp8", weight), ("bf16", weight.to_dense(torch.bfloat16))):
        given = inputs_of(matrix, x)
        for how in SWEEPS[kind, 64 if each <= 64 else 128]:
            tiles = tile_list(bounds, how.rows, CUDA)
            try:
                call = functools.partial(gemm, given, matrix, tiles, how, out, tokens_R=tokens)
                ms = milliseconds(call, 3)
            except Exception as problem:  # not enough shared memory, say
                print(f"  {kind} {how}: {type(problem).__name__}", flush=True)
                continue
            sizes = how.rows, how.outputs, how.inputs, how.warps, how.stages
            print(f"  {kind} {each} {inputs} {sizes}: {flop / ms / 1e9:.0f}", flush=True)


def experts(tokens: int) -> None:
    """All of a group's work, as the forward pass does it; bits over cuts into groups."""
    parts = [random_weight((GROUP, *shape)) for shape in ((WIDTH, HIDDEN),) * 2]
    parts.append(random_weight((GROUP, HIDDEN, WIDTH)))
    x = (torch.randn((tokens, HIDDEN), device=CUDA) / 50).bfloat16()
    ids = torch.rand((tokens, EXPERTS), device=CUDA).argsort(1)[:, :CHOSEN]
    weights = torch.rand((tokens, CHOSEN), device=CUDA)
    routed = group_tokens(ids, weights, EXPERTS, HostCopies())

    def all_of(cuts: tuple[int, ...], out: torch.Tensor) -> torch.Tensor:
        for first, last in itertools.pairwise(cuts):
            some = [Fp8Matrix(p.codes[first:last], p.scale[first:last], p.block) for p in parts]
            add_experts(SPEC, ExpertGroup(32 + first, *some), x, routed, out)
        return out

    whole = all_of((0, GROUP), torch.zeros((tokens, HIDDEN), device=CUDA))
    cut = all_of((0, 5, 6, GROUP), torch.zeros((tokens, HIDDEN), device=CUDA))
    out = torch.zeros((tokens, HIDDEN), device=CUDA)
    ms = milliseconds(lambda: all_of((0, GROUP), out))
    pairs = routed.begin[32 + GROUP] - routed.begin[32]
    flop = 6.0 * pairs * HIDDEN * WIDTH
    print(
        f"experts of {tokens} tokens, {GROUP} of {EXPERTS}, {pairs} pairs: {ms:.2f} ms, "
        f"{flop / ms / 1e9:.0f} TFLOP/s; bits of cuts {bool((cut == whole).all())}; a layer's "
        f"{EXPERTS // GROUP * ms:.0f} ms",
        flush=True,
    )


def attention(tokens: int, heads: int = 16) -> None:
    q, k = (torch.randn((tokens, heads, 192), device=CUDA).bfloat16() for _ in range(2))
    v = torch.randn((tokens, heads, 128), device=CUDA).bfloat16()
    rule = AttentionRule(scale=0.1)
    ms = milliseconds(lambda: attend("cudnn", q, k, v, rule))
    flop = 2.0 * heads * tokens * tokens / 2 * (192 + 128)
    print(f"cuDNN attention {tokens} x {heads} heads: {flop / ms / 1e9:.0f} TFLOP/s ({ms:.2f} ms)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--quantised", action="store_true", help="mode w8a8 alone")
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    if options.quantised:
        quantised(64)
        quantised(1024)
        return
    for each in (64, 256, 1024):
        grouped(each)
    for each in (64, 1024):
        quantised(each)
    for rows in (1024, 8192):
        dense(rows)
    for tokens in (2048, 8192, 32768):
        experts(tokens)
    for tokens in (8192, 32768):
        attention(tokens)
    print(f"most memory {torch.cuda.max_memory_allocated() / 1e9:.2f} GB")
    if options.sweep:
        sweep(1024, HIDDEN, WIDTH)
        sweep(1024, WIDTH, HIDDEN)
        sweep(64, HIDDEN, WIDTH)


if __name__ == "__main__":
    main()
