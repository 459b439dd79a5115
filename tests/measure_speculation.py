"""Speculation at given hit rates against decoding without: ``measure_speculation.py MODEL``.

A measurement run by hand, not a test. MODEL is a folder or a GGUF file of any architecture: a
scripted drafter, which knows the text that decoding gives, hits as often as it is told and costs
nothing itself. So the figures are those of verification: two rows a step. A round has one run
without drafts and one at each hit rate, in turns, and each ratio is taken inside its round.

Prediction from bytes: a step of one row reads the bytes of everything but the experts, and of top-k
experts a layer; a step of two rows reads the former once and the experts that either row chose,
E (1 - (1 - k/E)^2) of E when choices are uniform. A step gives 1 + h tokens at a hit rate of h.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from moechat import Engine, SamplingParams, _native
from moechat.models.spec import BoundTensor, ModelSpec

HIT_RATES = (0.0, 0.5, 0.85, 1.0)
SEED = 11
GIGA = 1e9


def stored_bytes(bound: BoundTensor) -> int:
    """Of a tensor with its scales and zero points."""
    parts = (bound.data, bound.scale, bound.zeros)
    return sum(part.array.nbytes for part in parts if part is not None)


def step_bytes(spec: ModelSpec, tensors: list[BoundTensor], rows: int) -> float:
    """Weight bytes of one step; embedding rows and the KV cache are left out."""
    experts = sum(stored_bytes(t) for t in tensors if ".experts." in t.spec.role)
    embedding = sum(stored_bytes(t) for t in tensors if t.spec.role == "embedding")
    others = sum(stored_bytes(t) for t in tensors) - experts
    if not spec.tied_embeddings:  # otherwise it is read as the head
        others -= embedding
    if spec.moe is None:
        return others
    unused = (1 - spec.moe.num_experts_per_token / spec.moe.num_experts) ** rows
    return others + experts * (1 - unused)


def decode(
    engine: Engine, prompt: list[int], num_tokens: int, drafter: _native.Drafter | None
) -> tuple[list[int], float, int, int]:
    """Ids, tokens a second from the first token on, drafted, accepted."""
    session = engine.session()
    session.drafter = drafter
    params = SamplingParams(temperature=1.0, seed=SEED, max_tokens=num_tokens, ignore_end=True)
    *events, last = session.generate(prompt, params)
    session.close()
    stats = last.stats
    ids = [event.token_id for event in events if event.token_id is not None]
    return ids, stats.decode_tokens_per_second, stats.drafted, stats.accepted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    with Engine.open(asked.model, threads=asked.threads) as engine:
        spec = engine.spec
        tensors = engine.model.files.bind()
        one, two = (step_bytes(spec, tensors, rows) for rows in (1, 2))
        prompt = [(7 * i + 3) % spec.vocab_size for i in range(16)]
        text = decode(engine, prompt, asked.tokens, None)[0]  # also warms up
        speeds: dict[float, list[float]] = {rate: [] for rate in HIT_RATES}
        ratios: dict[float, list[float]] = {rate: [] for rate in HIT_RATES}
        hits: dict[float, float] = {}
        alone: list[float] = []
        for _ in range(asked.rounds):
            alone.append(decode(engine, prompt, asked.tokens, None)[1])
            for rate in HIT_RATES:
                drafter = _native.ScriptedDrafter(text, len(prompt), rate, SEED, spec.vocab_size)
                ids, speed, drafted, accepted = decode(engine, prompt, asked.tokens, drafter)
                assert ids == text
                speeds[rate].append(speed)
                ratios[rate].append(speed / alone[-1])
                hits[rate] = accepted / drafted
            print(
                "tokens/s of a round, without drafts and by hit rate:",
                *(f"{speed:.1f}" for speed in (alone[-1], *(speeds[r][-1] for r in HIT_RATES))),
                flush=True,
            )
    print(f"{asked.model.name}, {asked.threads} threads, {asked.tokens} tokens")
    print(f"bytes of a step: {one / GIGA:.3f} GB with one row, {two / GIGA:.3f} GB with two")
    print(f"{'hit rate':>12} {'hits seen':>10} {'tokens/s':>9} {'ratio':>6} {'(min - max)':>14}"
          f" {'by bytes':>9}")  # fmt: skip
    print(f"{'without':>12} {'':>10} {statistics.median(alone):9.1f} {1:6.2f}")
    for rate in HIT_RATES:
        own = ratios[rate]
        print(f"{rate:12.2f} {hits[rate]:10.2f} {statistics.median(speeds[rate]):9.1f}"
              f" {statistics.median(own):6.2f} {f'({min(own):.2f} - {max(own):.2f})':>14}"
              f" {(1 + hits[rate]) * one / two:9.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
