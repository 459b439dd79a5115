"""Decode and prefill speed against llama.cpp on the same GGUF file, in alternating rounds.

    python docs/benchmarks/synthetic_gguf.py FOLDER
    python docs/benchmarks/compare_llama_bench.py FOLDER/b-q8_0.gguf --peer peer/bin/python \
        [--moechat-folder MODEL] [--rounds 7] [--threads 2]

llama.cpp comes through llama-cpp-python (compare_llamacpp.py tells how to build it). Each program
has a process of its own and waits for the pipe while the others compute. As in llama-bench: 64
tokens of decode from an empty context, 512 tokens of prefill in one batch. Decode follows random
tokens, which llama.cpp is given and moechat samples itself at temperature 1: its time holds the
sampler, llama.cpp's does not. --moechat-folder adds a model in Hugging Face layout of the same
shapes, such as one of FP8 or INT4, to the same rounds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
from pipe import Contestant, run
from rounds import Reading, print_header, print_rounds, print_summary, run_rounds

from moechat.bench.model.weight_bytes import of_files

DECODE_TOKENS, PREFILL_TOKENS = 64, 512
CONTEXT_TOKENS = 1024
FIRST_PLAIN_ID, NUM_PLAIN_IDS = 300, 7500  # no control token, and within small vocabularies
FILE = "moechat"
FOLDER = "moechat folder"
PEER = "llama.cpp"


def random_ids(generator: np.random.Generator, count: int) -> list[int]:
    """Ids that all models have."""
    ids = generator.integers(FIRST_PLAIN_ID, FIRST_PLAIN_ID + NUM_PLAIN_IDS, count)
    return [int(token) for token in ids]


def contestants_of(
    contest: str, processes: Mapping[str, Contestant], generator: np.random.Generator
) -> dict[str, Callable[[], float]]:
    """Tokens a second of one run of each program."""

    def once(name: str) -> float:
        process = processes[name]
        if contest == "prefill":
            ids = random_ids(generator, PREFILL_TOKENS)
            return PREFILL_TOKENS / float(process.ask("prefill", ids))
        ids = random_ids(generator, DECODE_TOKENS + 1)
        if name == PEER:
            return DECODE_TOKENS / float(process.ask("given", ids))
        return DECODE_TOKENS / float(process.ask("sampled", ids[0], DECODE_TOKENS, ids[1]))

    return {name: partial(once, name) for name in processes}


def main() -> None:
    """Both contests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("contests", nargs="*", metavar="CONTEST", help="decode, prefill")
    parser.add_argument("--peer", required=True, help="the Python that has llama-cpp-python")
    parser.add_argument("--moechat-folder", help="moechat's own format beside the file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_intermixed_args()
    threads, context = str(arguments.threads), str(CONTEXT_TOKENS)
    models = {FILE: arguments.model}
    if arguments.moechat_folder:
        models[FOLDER] = arguments.moechat_folder
    with ExitStack() as stack:
        processes = {}
        for name, model in models.items():
            worker = Contestant(sys.executable, "moechat_worker.py", [model, threads, context])
            processes[name] = stack.enter_context(worker)
        peer = Contestant(arguments.peer, "llamacpp_worker.py", [arguments.model, context])
        processes[PEER] = stack.enter_context(peer)
        info = peer.ask("info")
        peer.ask("use_threads", arguments.threads)
        print_header(**{"llama-cpp-python": f"{info['version']}, {info['features']}"})
        reading = Reading(np.memmap(arguments.model, np.uint8, "r"), arguments.threads)
        pids = [process.pid for process in processes.values()]
        sizes_gb = {name: of_files(Path(model)).total / 1e9 for name, model in models.items()}
        sizes_gb[PEER] = sizes_gb[FILE]
        for name, gigabytes in sizes_gb.items():
            print(f"{name}: {gigabytes:.3f} GB a token")
        sizes = {"decode": DECODE_TOKENS, "prefill": PREFILL_TOKENS}
        for contest in arguments.contests or sizes:
            contestants = contestants_of(contest, processes, np.random.default_rng(5))
            rounds = run_rounds(contestants, reading, arguments.rounds, pids)
            name = Path(arguments.model).name
            if FOLDER in models:
                name += f", folder {Path(models[FOLDER]).name}"
            title = f"{name}: {contest} of {sizes[contest]} tokens, {threads} threads"
            print_rounds(title, "tokens/s", rounds)
            print_summary(rounds, "tokens/s", sizes_gb if contest == "decode" else None)
            sys.stdout.flush()


if __name__ == "__main__":
    run(main)
