"""One session decodes while another prefills; several decode: ``measure_concurrency.py MODEL``.

A measurement run by hand, not a test. MODEL is a folder, a GGUF file or a registry name; with
``--synthetic`` it is a registry name whose shapes are built with random weights and ``--layers``
layers with experts. Everything is measured in turns inside each round, and ratios are taken inside
rounds. Gaps between tokens are those between the moments of sampling, on the decode thread's own
clock, so that nothing of a reader is in them.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from moechat import Engine, SamplingParams, _native
from moechat.bench.settings import model_entry
from moechat.bench.synthetic.config import Shape
from moechat.bench.synthetic.folder import synthetic_model
from moechat.bench.synthetic.tensors import Recipe
from moechat.decode.worker import DecodeStart
from moechat.engine.session import Session
from moechat.sample.chain import make_sampler

DECODE_PROMPT = 64
WARM_UP_SECONDS = 0.1
# Of (alone / share), by the issue: median and 99th percentile of the gaps, and the prefill rate.
LIMIT_MEDIAN, LIMIT_P99, LIMIT_PREFILL = 1.15, 1.5, 0.85


def prompt(engine: Engine, length: int, seed: int) -> list[int]:
    """Token ids that are neither special nor all alike."""
    return [10 + (seed + 37 * i) % (engine.spec.vocab_size - 20) for i in range(length)]


class Decoding:
    """Sessions that decode in the background from a prompt on, and when each token was sampled."""

    def __init__(self, engine: Engine, count: int, tokens: int) -> None:
        self.seconds: list[list[float]] = [[] for _ in range(count)]
        self.ids: list[list[int]] = [[] for _ in range(count)]
        self._engine = engine
        self._cancel = _native.CancelFlag()
        self._sessions = [engine.session() for _ in range(count)]
        self._queues = [_native.TokenQueue() for _ in range(count)]
        self._done = [threading.Event() for _ in range(count)]
        for seed, session in enumerate(self._sessions):
            session.extend(prompt(engine, DECODE_PROMPT, seed), logits=None)
        for session, queue, done in zip(self._sessions, self._queues, self._done):
            engine.decode.channel.send(self._start(session, queue, tokens, done))
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _start(
        self, session: Session, queue: _native.TokenQueue, tokens: int, done: threading.Event
    ) -> DecodeStart:
        params = SamplingParams(temperature=0)
        ids = session.timeline.ids
        return DecodeStart(
            cache=session.cache,
            position=len(session),
            sampler=make_sampler(params, 0, session.timeline.vocab_size, ids),
            queue=queue,
            cancel=self._cancel,
            token=5,
            max_tokens=tokens,
            context_tokens=self._engine.context_tokens,
            end_ids=[],
            drafter=None,
            done=lambda end, error: done.set(),
        )

    def _read(self) -> None:
        open_ = set(range(len(self._queues)))
        while open_:
            for i in list(open_):
                tokens, finished = self._queues[i].pop(0.01)
                self.ids[i].extend(token for token, _ in tokens)
                self.seconds[i].extend(seconds for _, seconds in tokens)
                if finished:
                    open_.remove(i)

    def wait(self) -> Decoding:
        """Until all have their tokens."""
        self._reader.join()
        for session in self._sessions:
            session.close()
        return self

    def stop(self) -> Decoding:
        self._cancel.raise_()
        return self.wait()

    def run_past(self, moment: float) -> None:
        """Until the first session has a token after ``moment``, or has ended."""
        while self.seconds[0][-1] < moment and not self._done[0].wait(0.001):
            pass

    def gaps(self, begin: float = 0.0, end: float = float("inf")) -> list[float]:
        """Seconds between tokens that both lie in [begin, end], of all sessions."""
        return [
            after - before
            for seconds in self.seconds
            for before, after in itertools.pairwise(seconds)
            if begin <= before and after <= end
        ]


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def prefill(engine: Engine, tokens: int, seed: int) -> tuple[float, float]:
    """When it began and ended."""
    session = engine.session()
    ids = prompt(engine, tokens, seed)
    began = time.monotonic()
    session.extend(ids, logits=None)
    ended = time.monotonic()
    session.close()
    return began, ended


def beside_prefill(engine: Engine, asked: argparse.Namespace) -> None:
    """Decode of one session alone, beside prefill, and prefill alone, in turns."""
    share = asked.share
    rows: list[list[float]] = []
    everything: list[float] = []
    room = engine.context_tokens - DECODE_PROMPT - 2
    reference: list[int] = []
    for round_ in range(asked.rounds):
        decoding = Decoding(engine, 1, min(asked.tokens, room)).wait()
        alone = decoding.gaps()
        reference = max(reference, decoding.ids[0], key=len)
        began, ended = prefill(engine, asked.prompt, round_)
        prefill_alone = ended - began
        decoding = Decoding(engine, 1, room)
        time.sleep(WARM_UP_SECONDS)
        began, ended = prefill(engine, asked.prompt, round_)
        decoding.run_past(ended)
        decoding.stop()
        together = decoding.gaps(began, ended)
        ids = decoding.ids[0]
        same = min(len(ids), len(reference))
        assert ids[:same] == reference[:same], "tokens differ from those of a run alone"
        if decoding.seconds[0][-1] < ended:
            print("decode ended before the prefill: the round is void")
            continue
        everything += together
        base = statistics.median(alone)
        rows.append([
            base * 1e3,
            percentile(alone, 0.99) / base,
            statistics.median(together) / (base / share),
            percentile(together, 0.99) / (base / share),
            max(together) / (base / share),
            prefill_alone / (ended - began) / (1 - share),
            asked.prompt / prefill_alone,
            len(together),
        ])  # fmt: skip
        print("  " + " ".join(f"{value:9.3f}" for value in rows[-1]), flush=True)
    if not rows:
        return
    names = ("alone ms", "p99/median", "median", "p99", "longest", "prefill", "alone t/s", "gaps")
    print("  " + " ".join(f"{name:>9}" for name in names))
    medians = [statistics.median(column) for column in zip(*rows)]
    print("  " + " ".join(f"{value:9.3f}" for value in medians), "  medians of the rounds")
    print(
        f"  gaps over (alone / {share}), limits {LIMIT_MEDIAN} and {LIMIT_P99}; prefill over "
        f"(alone * {1 - share:g}), limit {LIMIT_PREFILL}; percentiles of all gaps in ms: "
        + ", ".join(f"{p:g}: {percentile(everything, p) * 1e3:.2f}" for p in (0.5, 0.9, 0.99))
    )


def together(engine: Engine, asked: argparse.Namespace) -> None:
    """Tokens a second of 1, 2, 4 and 8 sessions that decode together."""
    counts = (1, 2, 4, 8)
    speeds: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(asked.rounds):
        for count in counts:
            gaps = Decoding(engine, count, asked.tokens).wait().gaps()
            speeds[count].append(count / statistics.median(gaps))
    for count in counts:
        ratios = [a / b for a, b in zip(speeds[count], speeds[1])]
        print(
            f"  {count} sessions: {statistics.median(speeds[count]):8.1f} tokens/s, "
            f"{statistics.median(ratios):5.2f} of one ({min(ratios):.2f} - {max(ratios):.2f})"
        )


@contextlib.contextmanager
def model_path(asked: argparse.Namespace) -> Iterator[str]:
    """What Engine.open takes."""
    if not asked.synthetic:
        yield asked.model
        return
    shape = Shape.of_entry(asked.model, model_entry(asked.model))
    shape = shape.cut(dense_layers=min(shape.dense_layers, 1), moe_layers=asked.layers)
    with synthetic_model(shape, Recipe.of(shape), lambda done, total: None) as model:
        yield str(model.path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--synthetic", action="store_true")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--prompt", type=int, default=3000)
    parser.add_argument("--tokens", type=int, default=200, help="of a decode alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("prefill", "together"))
    asked = parser.parse_args()
    with (
        model_path(asked) as path,
        Engine.open(path, threads=asked.threads, decode_share=asked.share) as engine,
    ):
        print(f"{Path(asked.model).name}, {asked.threads} threads")
        if asked.only != "together":
            beside_prefill(engine, asked)
        if asked.only != "prefill":
            together(engine, asked)


if __name__ == "__main__":
    main()
