"""The timings of an open engine: prefill of a length, decode at a context, sampling."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator

import numpy as np

from moechat import _native
from moechat.decode.worker import StepLast
from moechat.engine.engine import Engine
from moechat.engine.session import Session
from moechat.events import Finished
from moechat.kv.packet import native_packet
from moechat.quantize.float_codes import f32_to_bf16
from moechat.sample.params import SamplingParams

# Of a burst: long enough that its ends do not matter, short enough for the rounds to be neighbours.
_DECODE_SECONDS = 0.4
_MAX_DECODE_TOKENS = 200
_MIN_DECODE_TOKENS = 3
_FILL_TOKENS = 2048  # of one packet
_SAMPLES = 64
REFERENCE_VOCAB = 129_280  # DeepSeek-V3's: sampling is wanted within 0.3 ms there


class DecodeProbe:
    """A session with ``context`` tokens in its cache, decoded from there again and again.

    The cache is filled with random numbers, as a prompt of that length would cost minutes with some
    models: the time of a step depends on how many slots there are, not on what is in them. Raises
    PromptTooLong when the context does not fit the model's.
    """

    def __init__(self, engine: Engine, context: int, seed: int = 0) -> None:
        self._session = engine.session()
        self._context = context
        self._random = np.random.default_rng(seed)
        self._vocab = engine.spec.vocab_size
        self._tokens = _MIN_DECODE_TOKENS
        if context:
            _fill(engine, self._session, context, self._random)
        self._seed = seed
        self.seconds_per_token()  # the first one touches new pages
        tokens = round(_DECODE_SECONDS / self.seconds_per_token())
        room = engine.context_tokens - context - 1
        self._tokens = max(min(tokens, _MAX_DECODE_TOKENS, room), 1)

    @property
    def tokens(self) -> int:
        """Tokens of one burst."""
        return self._tokens

    def seconds_per_token(self) -> float:
        """One burst, at temperature 1: a step and a sample each. The session is then as before."""
        self._seed += 1
        params = SamplingParams(seed=self._seed, max_tokens=self._tokens, ignore_end=True)
        first = int(self._random.integers(self._vocab))
        finished: Finished | None = None
        for event in self._session.generate([first], params):
            if isinstance(event, Finished):
                finished = event
        assert finished is not None
        self._session.rewind(self._context)
        return finished.stats.decode_seconds / finished.stats.decode_tokens

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


def prefill_seconds(engine: Engine, tokens: int, seed: int = 0) -> float:
    """A prompt of random tokens in a new session, no logits."""
    ids = np.random.default_rng(seed).integers(0, engine.spec.vocab_size, tokens).tolist()
    session = engine.session()
    try:
        began = time.perf_counter()
        session.extend(ids, logits=None)
        return time.perf_counter() - began
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
