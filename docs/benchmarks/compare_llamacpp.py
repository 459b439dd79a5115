"""moechat and llama.cpp on the same GGUF file: logits, tokens, perplexity. Not speed.

    python -m venv peer
    CMAKE_ARGS="-DGGML_NATIVE=ON" peer/bin/pip install \
        --no-binary llama-cpp-python llama-cpp-python==0.3.36 numpy
    python docs/benchmarks/compare_llamacpp.py MODEL.gguf --peer peer/bin/python [--text FILE] \
        [logits] [tokens] [perplexity]

llama.cpp runs in a process of its own (llamacpp_worker.py), moechat in this one; only one computes
at a time. Both are given the same token ids. llama.cpp quantises activations to 8 bits and keeps
the KV cache in FP16; moechat's default mode has BF16 for both, and its exact mode float32.
"""

from __future__ import annotations

import argparse
import base64
import lzma
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from pipe import Contestant, run

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
LOGITS_TOKENS = 64


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


def logits(arguments: argparse.Namespace, peer: Contestant) -> None:
    """Distance of the logits of a text's first tokens, and both likelihoods of these tokens."""
    theirs: np.ndarray | None = None
    for compute in ("exact", "bf16"):
        with opened(arguments, compute) as engine:
            begin = bos(engine, arguments.model)
            ids = (begin + engine.text.tokenizer.encode(" ".join(PROMPTS)))[:LOGITS_TOKENS]
            if theirs is None:
                data = base64.b64decode(peer.ask("logits", ids))
                theirs = np.frombuffer(data, np.float32).reshape(len(ids), -1).astype(np.float64)
                print(f"llama.cpp: {likelihood(theirs, ids):.4f} nats a token, {len(ids)} tokens")
            found = engine.session().extend(ids)
        assert found is not None
        ours = found.astype(np.float64)
        errors = np.linalg.norm(ours - theirs, axis=1) / np.linalg.norm(theirs, axis=1)
        same = np.mean(ours.argmax(axis=1) == theirs.argmax(axis=1))
        print(
            f"{compute:6}{likelihood(ours, ids):.4f} nats a token; relative L2 of a position: "
            f"median {np.median(errors):.4f}, largest {errors.max():.4f}; same best {same:.2f}"
        )


def likelihood(rows: np.ndarray, ids: list[int]) -> float:
    """Mean negative log-likelihood of each id after those before it, in nats."""
    peaks = rows.max(axis=1)
    totals = peaks + np.log(np.exp(rows - peaks[:, None]).sum(axis=1))
    chosen = rows[np.arange(len(ids) - 1), ids[1:]]
    return float(np.mean(totals[:-1] - chosen))


def greedy(engine: Engine, ids: list[int], count: int) -> list[int]:
    """Greedy tokens after ``ids``, end tokens or not."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_end=True)
    events = engine.session().generate(ids, params)
    return [event.token_id for event in events if event.token_id is not None]


def tokens(arguments: argparse.Namespace, peer: Contestant) -> None:
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


def perplexity(arguments: argparse.Namespace, peer: Contestant) -> None:
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


def main() -> None:
    """Run the contests named, or all."""
    contests = {function.__name__: function for function in (logits, tokens, perplexity)}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("contests", nargs="*", metavar="CONTEST", help=", ".join(contests))
    parser.add_argument("--peer", required=True, help="the Python that has llama-cpp-python")
    parser.add_argument("--text", type=Path, help="text for perplexity; may be .xz")
    parser.add_argument("--text-tokens", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_intermixed_args()
    context = [arguments.model, str(CONTEXT_TOKENS)]
    with Contestant(arguments.peer, "llamacpp_worker.py", context) as peer:
        info = peer.ask("info")
        print(f"{Path(arguments.model).name}: moechat with {_native.active_instruction_set()}")
        print(f"llama-cpp-python {info['version']}: {info['features']}", flush=True)
        for name in arguments.contests or contests:
            contests[name](arguments, peer)
            sys.stdout.flush()


if __name__ == "__main__":
    run(main)
