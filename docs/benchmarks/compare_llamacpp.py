"""moechat and llama.cpp on the same GGUF file: tokens, perplexity, speed.

    python -m venv peer
    CMAKE_ARGS="-DGGML_NATIVE=ON" peer/bin/pip install \
        --no-binary llama-cpp-python llama-cpp-python==0.3.36 numpy
    python docs/benchmarks/compare_llamacpp.py MODEL.gguf --peer peer/bin/python [--text FILE] \
        [tokens] [perplexity] [speed]

llama.cpp runs in a process of its own (llamacpp_worker.py), moechat in this one; only one computes
at a time. Both are given the same token ids. llama.cpp quantises activations to 8 bits and keeps
the KV cache in FP16; moechat's default mode has BF16 for both, and its exact mode float32.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from moechat import Engine, SamplingParams, _native

PROMPTS = (
    "Water boils at",
    "def reverse(text):\n",
    "The three largest cities of Japan are",
    "Once upon a time, there was a fox who",
    "The derivative of x**3 + 2*x is",
)
GREEDY_TOKENS = 64
WINDOW_TOKENS = 512
CONTEXT_TOKENS = 1024
DECODE_PROMPT = "The history of the city began when"
DECODE_TOKENS = 96
PREFILL_TOKENS = 512
READ_BYTES = 1 << 30


class Peer:
    """llama.cpp in a process of its own."""

    def __init__(self, python: str, file: str) -> None:
        worker = Path(__file__).with_name("llamacpp_worker.py")
        self._process = subprocess.Popen(
            [python, str(worker), file, str(CONTEXT_TOKENS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, operation: str, *arguments: Any) -> Any:
        """The worker's answer."""
        assert self._process.stdin and self._process.stdout
        print(json.dumps([operation, arguments]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("llama.cpp's process has ended")
        return json.loads(answer)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def opened(arguments: argparse.Namespace, compute: str) -> Iterator[Engine]:
    """moechat with the context that llama.cpp has."""
    with Engine.open(
        arguments.model, compute=compute, threads=arguments.threads, context_tokens=CONTEXT_TOKENS
    ) as engine:
        yield engine


def bos(engine: Engine, file: str) -> list[int]:
    """The token that a text of this model begins with, if its file says so."""
    from moechat.weights.gguf_file import GGUFCheckpoint

    metadata = GGUFCheckpoint.open([Path(file)]).metadata
    kind, stated = (metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "add_bos_token"))
    wanted = kind == "llama" if stated is None else stated
    return [engine.spec.bos_id] if wanted and engine.spec.bos_id is not None else []


def greedy(engine: Engine, ids: list[int], count: int) -> list[int]:
    """Greedy tokens after ``ids``, end tokens or not."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_end=True)
    events = engine.session().generate(ids, params)
    return [event.token_id for event in events if event.token_id is not None]


def tokens(arguments: argparse.Namespace, peer: Peer) -> None:
    """Common prefix of greedy tokens, and both margins where the two part."""
    steps_of: dict[str, Any] = {}
    for compute in ("exact", "bf16"):
        with opened(arguments, compute) as engine:
            begin = bos(engine, arguments.model)
            for prompt in PROMPTS:
                ids = begin + engine.text.tokenizer.encode(prompt)
                if prompt not in steps_of:
                    steps_of[prompt] = peer.ask("greedy", ids, GREEDY_TOKENS)
                steps = steps_of[prompt]
                theirs = [step[0] for step in steps]
                ours = greedy(engine, ids, GREEDY_TOKENS)
                pairs = zip(ours, theirs)
                common = next((i for i, (a, b) in enumerate(pairs) if a != b), GREEDY_TOKENS)
                line = f"{compute:6}{prompt!r:42}{common:3} of {GREEDY_TOKENS} equal"
                if common < GREEDY_TOKENS:
                    logits = engine.session().extend(ids + ours[:common], logits="last")
                    assert logits is not None
                    margin = logits[0, ours[common]] - logits[0, theirs[common]]
                    is_second = "" if ours[common] in steps[common][2] else ", not its second"
                    line += f"; margin {margin:.3f} here, {steps[common][1]:.3f} there{is_second}"
                print(line)


def read_text(path: Path) -> str:
    """A text file, or one in xz."""
    content = path.read_bytes()
    return (lzma.decompress(content) if path.suffix == ".xz" else content).decode()


def negative_log_likelihood(engine: Engine, ids: list[int], first: int) -> float:
    """Of ids[first:], in nats; float64 sums over float32 logits."""
    session, total = engine.session(), 0.0
    session.extend(ids[: first - 1], logits=None)
    for begin in range(first - 1, len(ids) - 1, 128):
        piece = ids[begin : min(begin + 128, len(ids) - 1)]
        logits = session.extend(piece)
        assert logits is not None
        wide = logits.astype(np.float64)
        peak = wide.max(axis=1)
        following = ids[begin + 1 : begin + 1 + len(piece)]
        chosen = wide[np.arange(len(piece)), following]
        wide -= peak[:, None]
        total += float(np.sum(peak + np.log(np.exp(wide, out=wide).sum(axis=1)) - chosen))
    return total


def perplexity(arguments: argparse.Namespace, peer: Peer) -> None:
    """Of the second halves of windows of a text."""
    if arguments.text is None:
        raise SystemExit("perplexity needs --text")
    half, sums = WINDOW_TOKENS // 2, {}
    windows: list[list[int]] = []
    for compute in ("exact", "bf16"):
        with opened(arguments, compute) as engine:
            if not windows:
                text = read_text(arguments.text)[: 8 * arguments.text_tokens]
                ids = engine.text.tokenizer.encode(text)
                print("tokens of the text equal:", ids == peer.ask("tokenize", text))
                begin = bos(engine, arguments.model)
                step = WINDOW_TOKENS - len(begin)
                windows = [
                    begin + ids[start : start + step]
                    for start in range(0, min(len(ids), arguments.text_tokens) - step + 1, step)
                ]
                sums["llama.cpp"] = sum(peer.ask("score", ids, half) for ids in windows)
            name = f"moechat {compute}"
            sums[name] = sum(negative_log_likelihood(engine, ids, half) for ids in windows)
    scored = len(windows) * (WINDOW_TOKENS - half)
    theirs = math.exp(sums["llama.cpp"] / scored)
    print(f"perplexity of {scored} tokens in {len(windows)} windows of {WINDOW_TOKENS}:")
    for name, value in sums.items():
        ours = math.exp(value / scored)
        print(f"  {name:15}{ours:9.4f}  {100 * (ours / theirs - 1):+.3f} %")


@cache
def _buffer() -> np.ndarray:
    return np.ones(READ_BYTES, np.uint8)


def read_rate(threads: int) -> float:
    """GB/s of plain reading by as many threads as compute."""
    from concurrent.futures import ThreadPoolExecutor

    data, share = _buffer(), READ_BYTES // threads
    with ThreadPoolExecutor(threads) as pool:
        began = time.perf_counter()
        list(
            pool.map(
                lambda part: _native.read_checksum(data, part * share, (part + 1) * share),
                range(threads),
            )
        )
        return READ_BYTES / (time.perf_counter() - began) / 1e9


def decode_seconds(engine: Engine, ids: list[int], count: int) -> float:
    """Seconds of ``count`` greedy steps after the first token."""
    params = SamplingParams(temperature=0, max_tokens=count + 1, ignore_end=True)
    times = [
        time.perf_counter()
        for event in engine.session().generate(ids, params)
        if event.token_id is not None
    ]
    assert len(times) == count + 1
    return times[-1] - times[0]


def prefill_seconds(engine: Engine, ids: list[int]) -> float:
    """Seconds until the logits of the last id are there."""
    session = engine.session()
    began = time.perf_counter()
    session.extend(ids, logits="last")
    return time.perf_counter() - began


def spread(values: list[float], digits: int) -> str:
    """Median and range."""
    low, mid, high = min(values), statistics.median(values), max(values)
    return f"{mid:8.{digits}f}  ({low:.{digits}f} to {high:.{digits}f})"


def speed(arguments: argparse.Namespace, peer: Peer) -> None:
    """Alternating rounds; the ratio is taken within a round."""
    with opened(arguments, "bf16") as engine:
        short = bos(engine, arguments.model) + engine.text.tokenizer.encode(DECODE_PROMPT)
        long = [100 + 37 * index % 20_000 for index in range(PREFILL_TOKENS)]
        contests: dict[str, tuple[int, Callable[[], float], Callable[[], float]]] = {
            f"decode of {DECODE_TOKENS} tokens": (
                DECODE_TOKENS,
                lambda: decode_seconds(engine, short, DECODE_TOKENS),
                lambda: peer.ask("decode", short, DECODE_TOKENS),
            ),
            f"prefill of {PREFILL_TOKENS} tokens": (
                PREFILL_TOKENS,
                lambda: prefill_seconds(engine, long),
                lambda: peer.ask("prefill", long),
            ),
        }
        peer.ask("use_threads", arguments.threads)
        reads, loads = [], []
        rates: dict[str, list[list[float]]] = {name: [] for name in contests}
        for round_ in range(arguments.rounds + 1):
            loads.append(os.getloadavg()[0])
            reads.append(read_rate(arguments.threads))
            for name, (count, ours, theirs) in contests.items():
                # Who goes first alternates too.
                order = (ours, theirs) if round_ % 2 else (theirs, ours)
                seconds = {run: run() for run in order}
                rate = [count / seconds[ours], count / seconds[theirs]]
                print(f"round {round_}: {name}: {rate[0]:.1f} and {rate[1]:.1f} tokens/s")
                if round_:  # the first is warm-up
                    rates[name].append(rate)
    print(f"plain reading, {arguments.threads} threads, GB/s:   {spread(reads[1:], 1)}")
    print(f"load average before each round: {spread(loads[1:], 2)}")
    for name, pairs in rates.items():
        print(f"{name}, {arguments.threads} threads, {len(pairs)} rounds, tokens/s:")
        print(f"  moechat         {spread([pair[0] for pair in pairs], 1)}")
        print(f"  llama.cpp       {spread([pair[1] for pair in pairs], 1)}")
        print(f"  ratio per round {spread([pair[0] / pair[1] for pair in pairs], 2)}")


def processor() -> str:
    """The processor's name, as the system tells it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), "?")


def main() -> None:
    """Run the contests named, or all."""
    contests = {function.__name__: function for function in (tokens, perplexity, speed)}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("contests", nargs="*", metavar="CONTEST", help=", ".join(contests))
    parser.add_argument("--peer", required=True, help="the Python that has llama-cpp-python")
    parser.add_argument("--text", type=Path, help="text for perplexity; may be .xz")
    parser.add_argument("--text-tokens", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_intermixed_args()
    # One thread until speed counts: beside other jobs more of them would wait for each other.
    peer = Peer(arguments.peer, arguments.model)
    info = peer.ask("info")
    print(f"{Path(arguments.model).name} on {processor()}, {os.cpu_count()} processors")
    print(f"moechat: {_native.active_instruction_set()}")
    print(f"llama-cpp-python {info['version']}: {info['features']}")
    sys.stdout.flush()
    for name in arguments.contests or contests:
        contests[name](arguments, peer)
        sys.stdout.flush()
    peer.close()


if __name__ == "__main__":
    main()
