"""llama.cpp behind a pipe, for the comparisons; run by the Python that has llama-cpp-python.

Arguments: FILE CONTEXT_TOKENS. The low level interface is used, so that nothing of Python's stands
between two decode steps.
"""

from __future__ import annotations

import base64
import ctypes
import time
from collections.abc import Iterator
from typing import Any

import llama_cpp as lc  # type: ignore[import-not-found]
import numpy as np
from pipe import serve

BATCH_TOKENS = 512  # llama.cpp's own default for one pass


class Worker:
    """One model, one context; every operation begins with an empty KV cache."""

    def __init__(self, path: str, context_tokens: str) -> None:
        self._silence = lc.llama_log_callback(lambda level, text, data: None)
        lc.llama_log_set(self._silence, ctypes.c_void_p(0))
        model_params = lc.llama_model_default_params()
        self.model = lc.llama_model_load_from_file(path.encode(), model_params)
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        params = lc.llama_context_default_params()
        params.n_ctx = int(context_tokens)
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
        total = 0.0
        for begin, logits in self._all_logits(ids):
            for index in range(max(first - 1 - begin, 0), len(logits)):
                if begin + index + 1 < len(ids):
                    row = logits[index].astype(np.float64)
                    peak = row.max()
                    chosen = row[ids[begin + index + 1]]
                    total += float(peak + np.log(np.exp(row - peak).sum()) - chosen)
        return total

    def logits(self, ids: list[int]) -> str:
        """Of all positions: float32 [ids, vocabulary] in base64."""
        data = b"".join(logits.tobytes() for _, logits in self._all_logits(ids))
        return base64.b64encode(data).decode()

    def prefill(self, ids: list[int]) -> float:
        """Seconds until the logits of the last id are there."""
        self._clear()
        began = time.perf_counter()
        self._decode(ids)
        self._logits(1)[0].argmax()
        return time.perf_counter() - began

    def given(self, ids: list[int]) -> float:
        """Seconds of a step for each id but the first, which comes before."""
        self._clear()
        self._decode(ids[:1])
        self._logits(1)
        began = time.perf_counter()
        for token in ids[1:]:
            self._decode([token])
            self._logits(1)
        return time.perf_counter() - began

    def _clear(self) -> None:
        lc.llama_memory_clear(lc.llama_get_memory(self.context), True)

    def _decode(self, ids: list[int]) -> None:
        tokens = (lc.llama_token * len(ids))(*ids)
        assert lc.llama_decode(self.context, lc.llama_batch_get_one(tokens, len(ids))) == 0

    def _all_logits(self, ids: list[int]) -> Iterator[tuple[int, np.ndarray]]:
        """Position and logits of one batch after another; valid until the next."""
        self._clear()
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
            yield begin, self._logits(len(piece))

    def _logits(self, rows: int) -> np.ndarray:
        """View of the last batch's output rows; valid until the next batch."""
        pointer = lc.llama_get_logits(self.context)
        floats = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(floats, shape=(rows, self.num_tokens))


if __name__ == "__main__":
    serve(Worker)
