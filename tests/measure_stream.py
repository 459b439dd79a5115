"""Speed of the stream of weights on a GPU, run by hand: ``python tests/measure_stream.py``.

A file of the size of DeepSeek-V3's MoE layers is made in a temporary folder (11.3 GB a layer), and
streamed through the ring: GB/s beside a copy from page-locked memory between the same passes. Also
what decoding costs, and whether decoded weights are those of torch's CPU device, bit for bit.
Needs torch, numpy and the repository; no native module.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from moechat.gpu_weights import decode as decode_module
from moechat.gpu_weights.decode import decode
from moechat.gpu_weights.stored import Layout
from moechat.models.spec import BoundTensor, TensorSpec
from moechat.prefill.gpu.plan import StreamSettings
from moechat.prefill.gpu.streamed_source import StreamedSource
from moechat.weights.mapped import Checkpoint

HIDDEN, WIDTH = 7168, 2048
SHAPES = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
OUTPUT = (HIDDEN, 16384)  # the largest linear of the attention stands for it
BLOCK = 128


def write_layer(folder: Path, layer: int, experts: int) -> None:
    """One safetensors file of FP8 codes and scales, in the order of the public checkpoint's."""
    shapes = {f"{e}.{name}": shape for e in range(experts) for name, shape in SHAPES.items()}
    shapes["o"] = OUTPUT
    header: dict[str, Any] = {}
    end = 0
    for kind, dtype, each in (("scale", "F32", 4), ("weight", "F8_E4M3", 1)):
        for name in sorted(shapes):
            rows, cols = shapes[name]
            shape = (rows // BLOCK, cols // BLOCK) if kind == "scale" else (rows, cols)
            begin, end = end, end + shape[0] * shape[1] * each
            header[f"{layer}.{name}.{kind}"] = {
                "dtype": dtype, "shape": list(shape), "data_offsets": [begin, end],
            }  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    random = np.random.default_rng(layer)
    scales = sum(r // BLOCK * (c // BLOCK) for r, c in shapes.values())
    left = end - 4 * scales
    noise = random.integers(0, 256, 64 << 20, np.uint8)
    noise[(noise & 0x7F) == 0x7F] = 0
    with (folder / f"layer-{layer:05d}.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.write((random.random(scales, np.float32) / 64).tobytes())
        while left:
            size = min(left, len(noise) - 4096 * int(random.integers(0, 64)))
            file.write(noise[:size].data)
            left -= size


def bind(folder: Path, layers: int, experts: int) -> tuple[Checkpoint, list[BoundTensor]]:
    names = {}
    for layer in range(layers):
        (folder / "model.safetensors.index.json").touch()
        file = f"layer-{layer:05d}.safetensors"
        for name in ["o", *(f"{e}.{n}" for e in range(experts) for n in SHAPES)]:
            names |= {f"{layer}.{name}.{kind}": file for kind in ("scale", "weight")}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    checkpoint, tensors = Checkpoint.open(folder), []
    for layer in range(layers):
        for name in ["o", *(f"{e}.{n}" for e in range(experts) for n in SHAPES)]:
            role = f"layers.{layer}." + ("o" if name == "o" else f"experts.{name}")
            data = checkpoint.tensors[f"{layer}.{name}.weight"]
            tensors.append(
                BoundTensor(
                    spec=TensorSpec(name=data.name, shape=data.shape, role=role, matrix=True),
                    format="fp8", data=data, scale=checkpoint.tensors[f"{layer}.{name}.scale"],
                )
            )  # fmt: skip
    return checkpoint, tensors


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


def pinned_rate(device: torch.device) -> float:
    """GB/s of 8 MB pieces from page-locked memory."""
    size, piece = 1 << 30, 8 << 20
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(4):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for begin in range(0, size, piece):
            target[begin : begin + piece].copy_(host[begin : begin + piece], non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return size / statistics.median(seconds) / 1e9


def one_pass(source: StreamedSource, layers: int, use: Callable[..., None]) -> dict[str, float]:
    """All layers once; ``use`` gets every group."""
    before = source.statistics()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for layer in range(layers):
        source.begin(layer)
        source.matrix(f"layers.{layer}.o")
        for group in source.expert_groups(layer):
            use(layer, group)
        source.release(layer)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    after = source.statistics()
    copied = after.copied_bytes - before.copied_bytes
    return {
        "gb_per_s": copied / seconds / 1e9,
        "copies_gb_per_s": copied / (after.copy_seconds - before.copy_seconds) / 1e9,
        "seconds": seconds,
        "stall_seconds": after.stall_seconds - before.stall_seconds,
        "staged_gb": (after.staged_bytes - before.staged_bytes) / 1e9,
        "page_locked_gb": after.page_locked_bytes / 1e9,
    }


def same_formats(device: torch.device) -> list[str]:
    """Formats whose weights on the device differ from the CPU's; every code with every scale."""
    random = np.random.default_rng(5)
    layouts = [
        Layout("fp8", 300, 400, (128, 128), (3, 4), "F32"),
        Layout("fp8", 300, 400, (300, 400), (1, 1), "F32"),
        Layout("fp8", 300, 400, (1, 400), (300, 1), "BF16"),
        Layout("int4", 300, 448, (1, 32), (300, 14), "BF16"),
        Layout("mxfp4", 300, 448, (1, 32), (300, 14), "U8"),
        Layout("f16", 300, 400), Layout("f32", 300, 400), Layout("bf16", 300, 400, transposed=True),
    ]  # fmt: skip
    bits = {"fp8": 8, "int4": 4, "mxfp4": 4, "f16": 16, "f32": 32, "bf16": 16}
    scale_bytes = {"F32": 4, "BF16": 2, "U8": 1, "": 0}
    wrong = []
    for layout in layouts:
        size = layout.rows * layout.cols * bits[layout.format] // 8
        data = torch.from_numpy(random.integers(0, 256, (2, size), np.uint8))
        grid = 2 * layout.grid[0] * layout.grid[1] * scale_bytes[layout.scale_dtype]
        scale = torch.from_numpy(random.integers(0, 256, (2, grid // 2), np.uint8))
        if layout.scale_dtype == "F32":
            scale = torch.from_numpy(random.random((2, grid // 8), np.float32)).view(torch.uint8)
        for dtype in (torch.bfloat16, torch.float32):
            here = decode(layout, data, scale, dtype)
            there = decode(layout, data.to(device), scale.to(device), dtype).cpu()
            # NaN is NaN: its other bits are nobody's business.
            integers = torch.int16 if dtype == torch.bfloat16 else torch.int32
            equal = here.contiguous().view(integers) == there.contiguous().view(integers)
            if not bool((equal | (here.isnan() & there.isnan())).all()):
                wrong.append(f"{layout.format} {layout.scale_dtype} {dtype}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--group-experts", type=int, default=32)
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    device = torch.device("cuda")
    folder = Path(tempfile.mkdtemp(prefix="moechat-stream-", dir=options.folder))
    try:
        measure(folder, device, options)
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, device: torch.device, options: argparse.Namespace) -> None:
    began = time.perf_counter()
    for layer in range(options.layers):
        write_layer(folder, layer, options.experts)
    print(f"written in {time.perf_counter() - began:.1f} s", flush=True)
    wrong = same_formats(device)
    print(
        "decoders:", "differ from the CPU's: " + ", ".join(wrong) if wrong else "equal to the CPU's"
    )
    _, tensors = bind(folder, options.layers, options.experts)
    spec: Any = SimpleNamespace(num_layers=options.layers)
    one = sum(r * c + r // BLOCK * (c // BLOCK) * 4 for r, c in SHAPES.values())
    group_bytes = options.group_experts * one
    by_role = {tensor.spec.role: tensor for tensor in tensors}
    checked = []

    def compare(layer: int, group: Any) -> None:
        for name in SHAPES:
            number = (group.first * 7 + layer) % len(group.gate)
            tensor = by_role[f"layers.{layer}.experts.{group.first + number}.{name}"]
            rows, cols = SHAPES[name]
            layout = Layout(
                "fp8", rows, cols, (BLOCK, BLOCK), (rows // BLOCK, cols // BLOCK), "F32"
            )
            raw = [
                torch.from_numpy(np.array(part.array).reshape(1, -1).view(np.uint8))
                for part in (tensor.data, tensor.scale)
                if part is not None
            ]
            expected = decode(layout, raw[0], raw[1], torch.bfloat16)[0]
            found = getattr(group, name)[number].cpu()
            checked.append(bool((found.view(torch.int16) == expected.view(torch.int16)).all()))

    def ignore(layer: int, group: Any) -> None:
        pass

    for label, page_lock_bytes in (("page-locked", None), ("by way of buffers", 0)):
        anonymous = anonymous_bytes()
        began = time.perf_counter()
        source = StreamedSource(
            spec, tensors, device=device,
            settings=StreamSettings(
                group_bytes=group_bytes, num_slots=options.slots, page_lock_bytes=page_lock_bytes
            ),
        )  # fmt: skip
        print(f"{label}: opened in {time.perf_counter() - began:.3f} s")
        for round_ in range(5 if page_lock_bytes is None else 2):
            pinned = pinned_rate(device)
            figures = one_pass(source, options.layers, ignore)
            share = figures["gb_per_s"] / pinned
            text = " ".join(f"{name} {value:.3f}" for name, value in figures.items())
            print(f"  pass {round_}: {text}; pinned {pinned:.1f}, {share:.3f} of it", flush=True)
        one_pass(source, options.layers, compare)
        grown = (anonymous_bytes() - anonymous) / 1e6
        print(
            f"  anonymous memory grew by {grown:.0f} MB (pinned test buffer and staging included)"
        )
        began = time.perf_counter()
        source.close()
        print(f"  closed in {time.perf_counter() - began:.3f} s")
    print(f"streamed experts equal to the CPU's: {sum(checked)} of {len(checked)}")
    time_decoder(device, options.group_experts)
    decode_module._triton = lambda: None
    time_decoder(device, options.group_experts)
    print(f"most memory {torch.cuda.max_memory_allocated() / 1e9:.2f} GB")


def time_decoder(device: torch.device, experts: int) -> None:
    """Milliseconds of decoding one part of a group, FP8 to BF16."""
    rows, cols = SHAPES["gate"]
    layout = Layout("fp8", rows, cols, (BLOCK, BLOCK), (rows // BLOCK, cols // BLOCK), "F32")
    data = torch.zeros((experts, rows * cols), dtype=torch.uint8, device=device)
    grid = (experts, *layout.grid)
    scale = torch.ones(grid, device=device).view(torch.uint8).view(experts, -1)
    out = torch.empty(experts * rows * cols, dtype=torch.bfloat16, device=device)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    milliseconds = []
    for _ in range(5):
        first.record()
        decode(layout, data, scale, torch.bfloat16, out)
        last.record()
        last.synchronize()
        milliseconds.append(first.elapsed_time(last))
    kind = "triton" if decode_module._triton() else "torch"
    took = statistics.median(milliseconds)
    print(f"decoding {data.nbytes / 1e9:.2f} GB of FP8, {kind}: {took:.2f} ms")


if __name__ == "__main__":
    main()
