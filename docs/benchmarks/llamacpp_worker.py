"""llama.cpp behind a pipe, for compare_llamacpp.py; run by the Python that has llama-cpp-python.

Reads a JSON request a line, [operation, arguments], and writes its JSON answer as a line. The low
level interface is used, so that nothing of Python's stands between two decode steps but an argmax.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from typing import Any

import llama_cpp as lc  # type: ignore[import-not-found]
import numpy as np

BATCH_TOKENS = 512  # llama.cpp's own default for one pass


class Worker:
    """One model, one context; every operation begins with an empty KV cache."""

    def __init__(self, path: str, context_tokens: int) -> None:
        model_params = lc.llama_model_default_params()
        self.model = lc.llama_model_load_from_file(path.encode(), model_params)
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        params = lc.llama_context_default_params()
        params.n_ctx = context_tokens
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_threads = params.n_threads_batch = 1
        self.context = lc.llama_init_from_model(self.model, params)
        self.vocabulary = lc.llama_model_get_vocab(self.model)
        self.num_tokens = lc.llama_vocab_n_tokens(self.vocabulary)

    def info(self) -> dict[str, Any]:
        """Version and what the build computes with."""
        features = lc.llama_print_system_info().decode().replace(" = 1", "").split(" | ")
        return {"version": lc.__version__, "features": " ".join(filter(None, features))}

    def use_threads(self, threads: int) -> None:
        """From now on."""
        lc.llama_set_n_threads(self.context, threads, threads)

    def tokenize(self, text: str) -> list[int]:
        """Ids of plain text: no token is added, and no spelling becomes a control token."""
        data = text.encode()
        buffer = (lc.llama_token * (len(data) + 8))()
        count = lc.llama_tokenize(
            self.vocabulary, data, len(data), buffer, len(buffer), False, False
        )
        return list(buffer[:count])

    def greedy(self, ids: list[int], count: int) -> list[tuple[int, float, list[int]]]:
        """Of each step: the token, its margin over the second, and both."""
        steps: list[tuple[int, float, list[int]]] = []
        self._clear()
        self._decode(ids)
        for _ in range(count):
            logits = self._logits(1)[0]
            pair = np.argpartition(logits, -2)[-2:].tolist()
            first, second = sorted(pair, key=lambda token: -logits[token])
            steps.append((first, float(logits[first] - logits[second]), [first, second]))
            self._decode([first])
        return steps

    def score(self, ids: list[int], first: int) -> float:
        """Negative log-likelihood of ids[first:] in nats, in float64 over float32 logits."""
        self._clear()
        total = 0.0
        for begin in range(0, len(ids), BATCH_TOKENS):
            piece = ids[begin : begin + BATCH_TOKENS]
            batch = lc.llama_batch_init(len(piece), 0, 1)
            batch.n_tokens = len(piece)
            for index, token in enumerate(piece):
                batch.token[index], batch.pos[index] = token, begin + index
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
                batch.logits[index] = 1
            assert lc.llama_decode(self.context, batch) == 0
            lc.llama_batch_free(batch)
            logits = self._logits(len(piece))
            for index in range(max(first - 1 - begin, 0), len(piece)):
                if begin + index + 1 < len(ids):
                    row = logits[index].astype(np.float64)
                    peak = row.max()
                    chosen = row[ids[begin + index + 1]]
                    total += float(peak + np.log(np.exp(row - peak).sum()) - chosen)
        return total

    def prefill(self, ids: list[int]) -> float:
        """Seconds until the logits of the last id are there."""
        self._clear()
        began = time.perf_counter()
        self._decode(ids)
        self._logits(1)[0].argmax()
        return time.perf_counter() - began

    def decode(self, ids: list[int], count: int) -> float:
        """Seconds of ``count`` greedy steps after the ids and one first token."""
        self._clear()
        self._decode(ids)
        token = int(self._logits(1)[0].argmax())
        began = time.perf_counter()
        for _ in range(count):
            self._decode([token])
            token = int(self._logits(1)[0].argmax())
        return time.perf_counter() - began

    def _clear(self) -> None:
        lc.llama_memory_clear(lc.llama_get_memory(self.context), True)

    def _decode(self, ids: list[int]) -> None:
        tokens = (lc.llama_token * len(ids))(*ids)
        assert lc.llama_decode(self.context, lc.llama_batch_get_one(tokens, len(ids))) == 0

    def _logits(self, rows: int) -> np.ndarray:
        """View of the last batch's output rows; valid until the next batch."""
        pointer = lc.llama_get_logits(self.context)
        floats = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(floats, shape=(rows, self.num_tokens))


def main() -> None:
    """Answer requests until the pipe ends."""
    silence = lc.llama_log_callback(lambda level, text, data: None)
    lc.llama_log_set(silence, ctypes.c_void_p(0))
    path, context_tokens = sys.argv[1:]
    # llama.cpp prints where it likes; answers keep a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker(path, int(context_tokens))
    for line in sys.stdin:
        operation, arguments = json.loads(line)
        print(json.dumps(getattr(worker, operation)(*arguments)), file=answers, flush=True)


if __name__ == "__main__":
    main()
