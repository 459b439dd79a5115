"""moechat behind a pipe, for compare_llama_bench.py and beside_a_neighbour.py.

Arguments: MODEL THREADS CONTEXT_TOKENS; MODEL is a GGUF file or a folder.
"""

from __future__ import annotations

import time

from pipe import serve

from moechat import Engine, SamplingParams


class Worker:
    """One engine; every operation begins with an empty KV cache."""

    def __init__(self, model: str, threads: str, context_tokens: str) -> None:
        self._engine = Engine.open(
            model, threads=int(threads), context_tokens=int(context_tokens), device="cpu"
        )

    def prefill(self, ids: list[int]) -> float:
        """Seconds until the logits of the last id are there."""
        session = self._engine.session()
        began = time.perf_counter()
        session.extend(ids, logits="last")
        return time.perf_counter() - began

    def sampled(self, first: int, count: int, seed: int) -> float:
        """Seconds of ``count`` steps, each with its sampled token, after ``first`` and one more.

        At temperature 1 a model of random weights gives random tokens, so that experts are cold;
        greedy tokens would repeat.
        """
        params = SamplingParams(temperature=1, seed=seed, max_tokens=count + 1, ignore_end=True)
        times = [
            time.perf_counter()
            for event in self._engine.session().generate([first], params)
            if event.token_id is not None
        ]
        return times[-1] - times[0]


if __name__ == "__main__":
    serve(Worker)
