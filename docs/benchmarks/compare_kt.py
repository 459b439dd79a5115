"""Routed experts at DeepSeek-V3's shapes: moechat, kt-kernel 0.7.2 and plain reading in turn.

    python docs/benchmarks/compare_kt.py --peer FOLDER --install     # a throw-away environment
    python docs/benchmarks/compare_kt.py --peer FOLDER [--format fp8 ...] [--threads 1 2] \
        [--batch 1 8] [--rounds 7] [--files FOLDER]

One call is what one layer does for a token: 8 of 64 experts (32 for bf16), gate and up, SwiGLU,
down, weighted sum. Both programs get the same file of random weights (expert_files.py) and the same
inputs, and draw their routing alike; moechat reads the file's mapping, kt-kernel its tiled copy.
Batch 1 walks permutations of all experts, so that one returns only after the others; batch 8 draws
8 of all for each of its tokens. A burst is one such walk, or some calls, well under a second; its
figure is bytes of the distinct experts over the median call. First of all, the results of both
are compared with float64.

Files of 1.6 to 2.8 GB are written to a temporary folder, or kept in --files.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable
from pathlib import Path

import expert_files
import numpy as np
from expert_files import EXPERTS_PER_TOKEN, FORMATS, HIDDEN, bf16_values
from moechat_experts import Experts
from numpy.typing import NDArray
from pipe import Contestant, run
from rounds import Reading, print_header, print_rounds, print_summary, run_rounds

EXPERTS = {"fp8": 64, "int4": 64, "mxfp4": 64, "bf16": 32}
CHECKED_TOKENS = 3
CALLS_OF_EIGHT = 3
# A CPU build of torch is enough, where the index has one.
PACKAGES = ("torch==2.13.0", "numpy", "safetensors==0.8.0", "gguf==0.19.0", "typer==0.29.2",
            "rich==15.0.0", "pyyaml", "httpx", "packaging")  # fmt: skip


def install(folder: Path) -> None:
    """kt-kernel and what its import needs; it pins a torch release that this path does not use."""
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install"]
    subprocess.run([*pip, *PACKAGES], check=True)
    subprocess.run([*pip, "--no-deps", "kt-kernel==0.7.2"], check=True)


def weights_file(folder: Path, format_: str) -> Path:
    """The file of a format in a folder, written unless it is there."""
    path = folder / f"experts-{format_}.bin"
    if not path.exists():
        expert_files.write(path, format_, EXPERTS[format_])
    return path


def rounded(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """To BF16 by cutting: what both programs take as it is."""
    return bf16_values((x.view(np.uint32) >> 16).astype(np.uint16))


def check(ours: Experts, peer: Contestant, path: Path, format_: str, count: int) -> None:
    """Print both programs' distance from float64: some tokens, all on the same 8 experts."""
    generator = np.random.default_rng(1)
    x = rounded(generator.standard_normal((CHECKED_TOKENS, HIDDEN), np.float32))
    chosen = generator.choice(count, EXPERTS_PER_TOKEN, replace=False)
    ids = np.array([generator.permutation(chosen) for _ in x], np.int32)
    weights = generator.random(ids.shape, np.float32)
    experts = expert_files.open_file(path, format_, count)
    wanted = expert_files.reference(format_, experts, x.astype(np.float64), ids, weights)
    theirs = np.array(peer.ask("outputs", x.tolist(), ids.tolist(), weights.tolist()))
    one = np.array(peer.ask("outputs", x[:1].tolist(), ids[:1].tolist(), weights[:1].tolist()))
    results = {
        "moechat": (ours.outputs(x, ids, weights), ours.outputs(x[:1], ids[:1], weights[:1])),
        "kt-kernel": (theirs, one),
    }
    for name, (three, single) in results.items():
        errors = (distance(three, wanted), distance(single, wanted[:1]))
        print(f"{name}: relative L2 error {errors[0]:.5f}, one token {errors[1]:.5f}")
        if not max(errors) < 0.05:
            raise SystemExit(f"{name} computes something else: no comparison")


def distance(values: NDArray[np.floating], wanted: NDArray[np.float64]) -> float:
    """Relative L2."""
    return float(np.linalg.norm(values - wanted) / np.linalg.norm(wanted))


class Routing:
    """Which experts the calls of a burst use."""

    def __init__(self, count: int, batch: int) -> None:
        self._count, self._batch = count, batch
        self._generator = np.random.default_rng(2)

    def draw(self) -> list[NDArray[np.int32]]:
        """Arrays [batch, 8], one a call."""
        if self._batch == 1:
            walk = self._generator.permutation(self._count).astype(np.int32)
            return list(walk.reshape(-1, 1, EXPERTS_PER_TOKEN))
        draws = [
            [
                self._generator.choice(self._count, EXPERTS_PER_TOKEN, replace=False)
                for _ in range(self._batch)
            ]
            for _ in range(CALLS_OF_EIGHT)
        ]
        return list(np.array(draws, np.int32))


def compare(arguments: argparse.Namespace, path: Path, format_: str, threads: int) -> None:
    """One format and thread count: results, then rounds for every batch size."""
    count = EXPERTS[format_]
    ours = Experts(format_, expert_files.open_file(path, format_, count), threads)
    python = str(arguments.peer / "bin" / "python")
    worker = [format_, str(path), str(count), str(threads)]
    with Contestant(python, "kt_worker.py", worker) as peer:
        print(f"\n## {format_}, {threads} threads; kt-kernel {peer.ask('info')}")
        check(ours, peer, path, format_, count)
        reading = Reading(np.memmap(path, np.uint8, "r"), threads)
        for batch in arguments.batch:
            contestants = bursts(ours, peer, format_, batch)
            rounds = run_rounds(contestants, reading, arguments.rounds, [peer.pid])
            title = f"{format_}, {threads} threads, batch {batch}, {count} experts"
            print_rounds(title, "GB/s of weights", rounds)
            print_summary(rounds, "GB/s", dict.fromkeys(contestants, 1.0))
            sys.stdout.flush()


def bursts(
    ours: Experts, peer: Contestant, format_: str, batch: int
) -> dict[str, Callable[[], float]]:
    """A burst of each contestant: GB/s of its median call."""
    routing = Routing(EXPERTS[format_], batch)
    x = rounded(np.random.default_rng(3).standard_normal((batch, HIDDEN), np.float32))
    sent, size = x.tolist(), expert_files.expert_bytes(format_)

    def rate(seconds: list[float], ids: list[NDArray[np.int32]]) -> float:
        distinct = [len(np.unique(of_call)) for of_call in ids]
        return statistics.median(n * size / s / 1e9 for n, s in zip(distinct, seconds))

    # Each draws for itself, so that its experts are cold whoever went before.
    def moechat_burst() -> float:
        ids = routing.draw()
        return rate(ours.burst(x, ids), ids)

    def kt_burst() -> float:
        ids = routing.draw()
        return rate(peer.ask("burst", sent, [of_call.tolist() for of_call in ids]), ids)

    return {"moechat": moechat_burst, "kt-kernel": kt_burst}


def main() -> None:
    """Compare what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=Path, required=True, help="kt-kernel's environment")
    parser.add_argument("--install", action="store_true", help="make that environment, no more")
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--files", type=Path, help="where weight files are kept")
    arguments = parser.parse_args()
    if arguments.install:
        install(arguments.peer)
        return
    print_header()
    with tempfile.TemporaryDirectory() as temporary:
        for format_ in arguments.format:
            path = weights_file(arguments.files or Path(temporary), format_)
            for threads in arguments.threads:
                compare(arguments, path, format_, threads)
            if arguments.files is None:
                path.unlink()


if __name__ == "__main__":
    run(main)
