"""What serving experts through a mailbox costs: ``measure_expert_server.py [--threads N]``.

A measurement run by hand, not a test; needs no GPU. A thread plays the GPU: it pauses, posts a
request and waits for the reply, spinning towards its end. The same experts are run directly after
the same pause, in turns with it, so that the difference is what mailbox, polling and waking cost.
Twice: experts of DeepSeek-V3's shapes (FP8, 8 of 16 a token, one token), and tiny ones, which leave
little but the fixed cost. Wanted: below 0.15 ms a layer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent / name) for name in ("kernels", "pipeline")]
from expert_model import _DIMS, weights_but_experts  # noqa: E402
from mailbox_client import MailboxClient  # noqa: E402

from moechat import _native  # noqa: E402

NUM_EXPERTS, TOP_K = 16, 8
SHAPES = {"tiny": (256, 128), "deepseek-v3": (7168, 2048)}  # hidden, inner
PAUSES_SECONDS = (0.0, 30e-6, 100e-6, 300e-6)
ROUNDS = {"tiny": 400, "deepseek-v3": 60}


def fp8_matrix(outputs: int, inputs: int, random: np.random.Generator) -> _native.MatrixView:
    codes = random.integers(0, 0x7F, (outputs, inputs), np.uint8)  # no NaN
    grid = np.full((-(-outputs // 128), -(-inputs // 128)), 1e-4, np.float32)
    return _native.MatrixView("fp8", codes, grid)


def model_of(hidden: int, inner: int) -> _native.Model:
    """One layer, of which only the routed experts are used."""
    random = np.random.default_rng(1)
    weights = weights_but_experts(hidden, NUM_EXPERTS)
    for expert in range(NUM_EXPERTS):
        for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)),
                            ("down", (hidden, inner))):  # fmt: skip
            weights[f"layers.0.experts.{expert}.{name}"] = fp8_matrix(*shape, random)
    counts = {"num_experts": NUM_EXPERTS, "num_experts_per_token": TOP_K, "hidden_size": hidden}
    rope = ([1.0, 0.1], 1.0, False)
    return _native.Model({**_DIMS, **counts}, [rope], [(0, 0)], "bf16", weights)


def pause(seconds: float) -> None:
    """Without sleeping: what a GPU's own part of a layer takes."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def inputs(seed: int, hidden: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.standard_normal((1, hidden), np.float32)
    ids = random.permutation(NUM_EXPERTS)[None, :TOP_K].astype(np.int32)
    return x, ids, random.random((1, TOP_K), np.float32)


def measure(name: str, threads: int) -> None:
    """Print medians, in microseconds, for each pause."""
    hidden, inner = SHAPES[name]
    model, pool = model_of(hidden, inner), _native.ThreadPool(threads)
    client = MailboxClient(1, hidden, TOP_K)
    server = _native.ExpertServer(model, pool, [client.place], 1)
    experts, out = _native.Experts(model, pool), np.empty((1, hidden), np.float32)
    stop = _native.CancelFlag()

    def serve() -> None:
        while server.serve(stop, 60)[1] == "step":
            pass

    thread = threading.Thread(target=serve)
    thread.start()
    for pause_seconds in PAUSES_SECONDS:
        served, direct = [], []
        for seed in range(ROUNDS[name]):
            own = inputs(seed, hidden)
            pause(pause_seconds)
            began = time.perf_counter()
            client.post(*own)
            if direct and direct[-1] > 1e-3:  # a GPU would not take a processor from the experts
                time.sleep(0.8 * direct[-1])
            while client.reply[0] != client.sequence:
                pass
            served.append(time.perf_counter() - began)
            pause(pause_seconds)
            began = time.perf_counter()
            experts.run(0, *own, out)
            direct.append(time.perf_counter() - began)
            assert client.y[0].tobytes() == out[0].tobytes()
        with_, without = (1e6 * statistics.median(values) for values in (served, direct))
        print(
            f"{name}, {threads} threads, after {1e6 * pause_seconds:.0f} us: {with_:.1f} us served,"
            f" {without:.1f} us directly: {with_ - without:+.1f} us, ratio {with_ / without:.3f}"
        )
    stop.raise_()
    thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=_native.available_cpus())
    parser.add_argument("--shape", choices=SHAPES, action="append")
    arguments = parser.parse_args()
    for name in arguments.shape or SHAPES:
        measure(name, arguments.threads)


if __name__ == "__main__":
    main()
