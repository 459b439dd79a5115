"""Decode beside another job on the same cores: how much speed is left for the share obtained.

    python docs/benchmarks/beside_a_neighbour.py MODEL.gguf [--llama PYTHON] \
        [--kt FOLDER [--files FOLDER]] [--threads 2] [--rounds 5] [--tokens 32]

The job is one endless loop pinned to each of as many processors as there are threads. A program
decodes alone, beside the job, and alone again. Its processor time is that of all its threads, as
the kernel counts it; the share obtained is its cores beside the job over its cores alone (time
spent spinning counts as obtained). What is kept is speed beside / (speed alone * share): 1 when
every bit of processor time that is left does work.

moechat and llama.cpp decode the file's tokens, kt-kernel one layer's FP8 experts (compare_kt.py
and compare_llamacpp.py tell how to install them).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import compare_kt
import expert_files
import numpy as np
from compare_llama_bench import random_ids
from pipe import Contestant, run
from rounds import PAUSE_SECONDS, print_header, spread

CONTEXT_TOKENS = 512
KT_FORMAT = "fp8"
# It ends with its parent, however that ends.
LOOP = """
import os, sys
os.sched_setaffinity(0, [int(sys.argv[1])])
while os.getppid() == int(sys.argv[2]):
    for _ in range(1_000_000): pass
"""
WANTED = 0.7


@contextmanager
def neighbour(threads: int) -> Iterator[None]:
    """Endless loops on the first processors that this process may use."""
    cpus = sorted(os.sched_getaffinity(0))[:threads]
    loops: list[subprocess.Popen[bytes]] = []
    try:
        for cpu in cpus:
            command = [sys.executable, "-c", LOOP, str(cpu), str(os.getpid())]
            loops.append(subprocess.Popen(command, start_new_session=True))
        time.sleep(0.3)  # they have started
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@dataclass(frozen=True)
class Program:
    """``run`` does its work once and returns units a second."""

    process: Contestant
    unit: str
    run: Callable[[], float]

    def measure(self) -> tuple[float, float]:
        """Speed, and cores it had while at it."""
        time.sleep(PAUSE_SECONDS)
        speed = self.run()
        return speed, self.process.cpu_seconds / self.process.seconds


def programs(arguments: argparse.Namespace, stack: ExitStack) -> dict[str, Program]:
    """Those that were asked for, started and warm."""
    generator = np.random.default_rng(6)
    threads, context = str(arguments.threads), str(CONTEXT_TOKENS)
    tokens: int = arguments.tokens

    def start(python: str, script: str, *command: str) -> Contestant:
        return stack.enter_context(Contestant(python, script, command))

    ours = start(sys.executable, "moechat_worker.py", arguments.model, threads, context)

    def moechat() -> float:
        first, seed = random_ids(generator, 2)
        return tokens / float(ours.ask("sampled", first, tokens, seed))

    result = {"moechat": Program(ours, "tokens/s", moechat)}
    if arguments.llama:
        llama = start(arguments.llama, "llamacpp_worker.py", arguments.model, context)
        llama.ask("use_threads", arguments.threads)

        def llamacpp() -> float:
            return tokens / float(llama.ask("given", random_ids(generator, tokens + 1)))

        result["llama.cpp"] = Program(llama, "tokens/s", llamacpp)
    if arguments.kt:
        folder = arguments.files or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        path, count = compare_kt.weights_file(folder, KT_FORMAT), compare_kt.EXPERTS[KT_FORMAT]
        python = str(arguments.kt / "bin" / "python")
        kt = start(python, "kt_worker.py", KT_FORMAT, str(path), str(count), threads)
        routing = compare_kt.Routing(count, 1)
        x = generator.standard_normal((1, expert_files.HIDDEN)).tolist()

        def kt_kernel() -> float:
            ids = [of_call.tolist() for _ in range(4) for of_call in routing.draw()]
            return len(ids) / float(sum(kt.ask("burst", x, ids)))

        result["kt-kernel"] = Program(kt, "layers/s", kt_kernel)
    for program in result.values():
        program.run()
    return result


def main() -> None:
    """Rounds of all programs, then what each keeps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a GGUF file, or a folder when moechat is alone")
    parser.add_argument("--llama", help="the Python that has llama-cpp-python")
    parser.add_argument("--kt", type=Path, help="kt-kernel's environment")
    parser.add_argument("--files", type=Path, help="where compare_kt.py keeps its files")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32)
    arguments = parser.parse_args()
    print_header(model=Path(arguments.model).name)
    heads = ["round", "program", "unit", "alone", "cores", "beside", "cores", "share", "kept"]
    with ExitStack() as stack:
        contestants = programs(arguments, stack)
        kept: dict[str, list[float]] = {name: [] for name in contestants}
        shares: dict[str, list[float]] = {name: [] for name in contestants}
        print(f"\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
        for number in range(1, arguments.rounds + 1):
            for name, program in contestants.items():
                before = program.measure()
                with neighbour(arguments.threads):
                    beside, cores_beside = program.measure()
                after = program.measure()
                alone, cores = ((a + b) / 2 for a, b in zip(before, after))
                share = cores_beside / cores
                kept[name].append(beside / alone / share)
                shares[name].append(share)
                print(
                    f"| {number} | {name} | {program.unit} | {before[0]:.2f}, {after[0]:.2f} | "
                    f"{cores:.2f} | {beside:.2f} | {cores_beside:.2f} | {share:.2f} | "
                    f"{kept[name][-1]:.2f} |",
                    flush=True,
                )
    print("\nmedian [lowest-highest]\n\n| program | share of its cores | kept |\n|---|---|---|")
    for name, values in kept.items():
        print(f"| {name} | {spread(shares[name])} | {spread(values)} |")
    print(f"\nwanted of moechat: >= {WANTED}")


if __name__ == "__main__":
    run(main)
