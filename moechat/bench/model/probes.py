"""Bursts of an open engine: decode at a context, prefill of a length; and sampling."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator

import numpy as np

from moechat import _native
from moechat.bench.bursts import Work
from moechat.decode.worker import StepLast
from moechat.engine.engine import Engine
from moechat.engine.session import Session
from moechat.events import Finished, TurnStats
from moechat.kv.packet import native_packet
from moechat.quantize.float_codes import f32_to_bf16
from moechat.sample.params import SamplingParams

# Of a burst: long enough that its ends do not matter, short enough for the rounds to be neighbours.
_DECODE_SECONDS = 0.4
_MAX_DECODE_TOKENS = 200
_MIN_DECODE_TOKENS = 3
_FILL_TOKENS = 2048  # of one packet
_SAMPLES = 64


class DecodeProbe:
    """A session with ``context`` tokens in its cache, decoded from there again and again.

    The cache is filled with random numbers, as a prompt of that length would cost minutes with some
    models: the time of a step depends on how many slots there are, not on what is in them. Raises
    PromptTooLong when the context does not fit the model's.
    """

    def __init__(self, engine: Engine, context: int, token_bytes: int = 0, seed: int = 0) -> None:
        self.threads = engine.threads
        self._session = engine.session()
        self._context, self._token_bytes = context, token_bytes
        self._random = np.random.default_rng(seed)
        self._vocab = engine.spec.vocab_size
        self._seed = seed
        self.tokens = _MIN_DECODE_TOKENS  # of one burst
        if context:
            _fill(engine, self._session, context, self._random)
        self.burst()  # the first one touches new pages
        work = self.burst()
        tokens = round(_DECODE_SECONDS * work.calls / work.seconds)
        room = engine.context_tokens - context - 1
        self.tokens = max(min(tokens, _MAX_DECODE_TOKENS, room), 1)

    def burst(self) -> Work:
        """At temperature 1, a step and a sample each token. The session is then as before."""
        self._seed += 1
        params = SamplingParams(seed=self._seed, max_tokens=self.tokens, ignore_end=True)
        first = int(self._random.integers(self._vocab))
        cpu_began = time.process_time()
        (finished,) = (
            event
            for event in self._session.generate([first], params)
            if isinstance(event, Finished)
        )
        cpu_seconds = time.process_time() - cpu_began
        self._session.rewind(self._context)
        tokens = finished.stats.decode_tokens
        return Work(tokens, finished.stats.decode_seconds, cpu_seconds, tokens * self._token_bytes)

    def close(self) -> None:
        """Free the cache."""
        self._session.close()


def _fill(engine: Engine, session: Session, tokens: int, random: np.random.Generator) -> None:
    """Put ``tokens`` random tokens on the timeline, and packets of random numbers in the cache."""
    session.timeline.extend(random.integers(0, engine.spec.vocab_size, tokens).tolist())
    cache, width = session.cache, engine.spec.kv_width
    values = random.standard_normal((_FILL_TOKENS, width)).astype(np.float32)
    rows = values if engine.compute == "exact" else f32_to_bf16(values)
    for layer in range(cache.num_layers):
        for begin in range(0, tokens, _FILL_TOKENS):
            end = min(begin + _FILL_TOKENS, tokens)
            positions = np.arange(begin, end, dtype=np.int32)
            packet = native_packet(
                cache.session, cache.epoch, layer, positions, rows[: end - begin]
            )
            engine.decode.channel.send_packet(packet, lambda: engine.closed)
    arrived: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    wait = StepLast(cache, tokens, None, lambda _, error: arrived.put(error))
    engine.decode.channel.send(wait)
    if (error := arrived.get()) is not None:
        raise error


class PrefillProbe:
    """A prompt of ``tokens`` random tokens in a new session, no logits."""

    def __init__(self, engine: Engine, tokens: int) -> None:
        self.threads = engine.threads
        self._engine, self._tokens, self._seed = engine, tokens, 0
        self.stats = TurnStats()  # of the last burst

    def burst(self) -> Work:
        """One prompt, another each time. Bytes are not counted: weights serve many tokens."""
        self._seed += 1
        random = np.random.default_rng(self._seed)
        ids = random.integers(0, self._engine.spec.vocab_size, self._tokens).tolist()
        session = self._engine.session()
        try:
            began, cpu_began = time.perf_counter(), time.process_time()
            session.extend(ids, logits=None)
            work = Work(1, time.perf_counter() - began, time.process_time() - cpu_began, 0)
            self.stats = session.last_stats
            return work
        finally:
            session.close()


def sampling_seconds(vocab: int) -> list[float]:
    """Seconds of drawing one token out of ``vocab`` logits, as an answer with top-p does."""
    random = np.random.default_rng(vocab)
    logits = 3 * random.standard_normal(vocab).astype(np.float32)
    sampler = _native.Sampler(
        vocab=vocab,
        temperature=0.6,
        top_k=0,
        top_p=0.95,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        seed=1,
    )
    seconds = []
    for position in range(_SAMPLES + 4):
        began = time.perf_counter()
        sampler.sample(logits, position)
        seconds.append(time.perf_counter() - began)
    return seconds[4:]


def growing(first: int, longest: int) -> Iterator[int]:
    """first, 4 first, 16 first, ... as far as ``longest`` allows; that itself if none does."""
    length = first
    if length > longest > 0:
        yield longest
    while length <= longest:
        yield length
        length *= 4
