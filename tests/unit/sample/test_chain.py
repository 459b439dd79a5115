"""The native sampler against the slow reference, and its promises about draws."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest

from moechat import _native
from moechat.sample.chain import make_sampler
from moechat.sample.params import SamplingParams

sys.path.insert(0, str(Path(__file__).parent))
from sampling_reference import kept_tokens, philox4x32, uniform

DRAWS = 300


def sampler(params, vocab, seed=1, context=(), answer=()):
    made = make_sampler(params, seed, vocab, context)
    for token in answer:
        made.accept(token)
    return made


def assert_draws_match(logits, params, *, context=(), answer=(), seed=1, draws=DRAWS):
    """Every draw is the reference's inverse CDF, up to rounding at an edge of the CDF."""
    ids, probabilities = kept_tokens(logits, params, context, answer)
    cdf = np.cumsum(probabilities)
    made = sampler(params, len(logits), seed, context, answer)
    ranks = {int(token): rank for rank, token in enumerate(ids)}
    for position in range(draws):
        token = made.sample(logits, position)
        assert token in ranks, f"{token} was cut"
        u, rank = uniform(seed, position), ranks[token]
        assert (cdf[rank - 1] if rank else 0) - 2e-6 <= u <= cdf[rank] + 2e-6


def rng_logits(kind: str, vocab: int) -> np.ndarray:
    rng = np.random.default_rng(5)
    logits = {
        "normal": lambda: rng.normal(size=vocab) * 3,
        "flat": lambda: rng.normal(size=vocab) * 1e-3,
        "equal": lambda: np.full(vocab, 7.25),
        "two values": lambda: rng.integers(0, 2, vocab),
        "steps": lambda: np.arange(vocab) // 100 * 0.125,
        "peaked": lambda: np.where(np.arange(vocab) < 20, 15 + rng.normal(size=vocab), -5),
        "masked": lambda: np.where(rng.random(vocab) < 0.9, -np.inf, rng.normal(size=vocab)),
        "dense": lambda: np.where(np.arange(vocab) == 3, 2, 1 + rng.random(vocab) * 1e-4),
    }[kind]()
    return logits.astype(np.float32)


KINDS = ["normal", "flat", "equal", "two values", "steps", "peaked", "masked", "dense"]
SETTINGS = [
    {},
    {"temperature": 0.6, "top_p": 0.95},
    {"temperature": 0.6, "top_p": 0.95, "top_k": 40},
    {"top_k": 1},
    {"top_k": 5},  # fewer than there are blocks of 256
    {"top_k": 3000},
    {"top_k": 10**6},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"temperature": 3.0, "top_k": 501, "top_p": 0.5, "min_p": 0.05},
    {"temperature": 0},
]


@pytest.mark.parametrize("changes", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_draws_are_the_inverse_cdf_of_the_reference(kind, changes):
    # With equal logits no share of top_p is a whole number of these: the cut hangs on no rounding.
    logits = rng_logits(kind, 4999)
    assert_draws_match(logits, SamplingParams(**changes))


def test_penalties():
    logits = np.array([2.0, -1.0, 1.5, 1.0, 0.0, 1.9], dtype=np.float32)
    params = SamplingParams(repetition_penalty=1.3, presence_penalty=0.7)
    for context, answer in [((), ()), ((0, 1, 1), ()), ((), (2, 2, 5)), ((1, 2), (0, 1, 0))]:
        assert_draws_match(logits, params, context=context, answer=answer)


def test_penalties_change_greedy_choices():
    logits = np.array([3.0, 2.9, -1.0], dtype=np.float32)
    greedy = {"temperature": 0.0}
    assert sampler(SamplingParams(**greedy), 3, context=[0], answer=[0]).sample(logits, 0) == 0
    repetition = SamplingParams(repetition_penalty=1.5, **greedy)
    assert sampler(repetition, 3).sample(logits, 0) == 0
    assert sampler(repetition, 3, context=[0]).sample(logits, 0) == 1
    assert sampler(repetition, 3, context=[0], answer=[1]).sample(logits, 0) == 0
    presence = SamplingParams(presence_penalty=0.5, **greedy)
    assert sampler(presence, 3, context=[0]).sample(logits, 0) == 0  # the prompt does not count
    assert sampler(presence, 3, answer=[0, 0, 0]).sample(logits, 0) == 1
    assert sampler(presence, 3, answer=[0, 0, 1]).sample(logits, 0) == 0  # once, not thrice
    # A penalty pushes a negative logit further down.
    negative = np.array([-1.0, -1.2], dtype=np.float32)
    assert sampler(repetition, 2, context=[0]).sample(negative, 0) == 1
    # The logits handed in stay as they are.
    assert logits.tolist() == np.array([3.0, 2.9, -1.0], dtype=np.float32).tolist()


def test_frequencies_follow_the_distribution():
    """Chi-square at a fixed seed: 19 degrees of freedom, 0.999 quantile 43.8."""
    logits = np.random.default_rng(0).normal(size=20).astype(np.float32)
    params = SamplingParams(temperature=0.8)
    ids, probabilities = kept_tokens(logits, params)
    made = sampler(params, 20, seed=12345)
    draws = 20000
    counts = np.bincount([made.sample(logits, p) for p in range(draws)], minlength=20)[ids]
    assert ((counts - draws * probabilities) ** 2 / (draws * probabilities)).sum() < 43.8


def test_draws_depend_on_seed_and_position_alone():
    logits = [rng_logits("normal", 1000) + np.float32(i) for i in range(3)]
    params = SamplingParams()
    forward = [sampler(params, 1000, seed=9).sample(logits[p % 3], p) for p in range(60)]
    made = sampler(params, 1000, seed=9)
    backward = [made.sample(logits[p % 3], p) for p in reversed(range(60))]
    assert backward[::-1] == forward
    other = sampler(params, 1000, seed=10)
    assert [other.sample(logits[p % 3], p) for p in range(60)] != forward
    assert len(set(forward)) > 10
    # All 64 bits of both count.
    for seed, position in [(9, 2**63), (2**63, 0), (9, 2**32), (2**32, 0)]:
        made = sampler(params, 1000, seed=seed)
        drawn = [made.sample(logits[0], (position + i) % 2**64) for i in range(30)]
        expected = [sampler(params, 1000, seed=9).sample(logits[0], i) for i in range(30)]
        assert drawn != expected


def test_philox_known_answers():
    """Vectors of the Random123 distribution (kat_vectors)."""
    ones = 0xFFFFFFFF
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    for counter, key, words in [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ones] * 4, [ones] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (pi, [0xA4093822, 0x299F31D0], [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ]:
        assert philox4x32(counter, key) == words
        assert list(_native.philox4x32(counter, key)) == words


HOSTILE = [0.0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 3e38, -3e38, 1e-45, -1e-45, 88]
HOSTILE_PARAMS = {
    "temperature": [0, 1e-300, 1e-40, 0.6, 1.0, 1e30, 1e300],
    "top_k": [0, 1, 2, 40, 2**31 - 1],
    "top_p": [1e-300, 0.5, 0.95, 1.0],
    "min_p": [0, 1e-300, 0.5, 1.0],
    "repetition_penalty": [1.0, 1.0, 1e-30, 1.3, 1e300],
    "presence_penalty": [0.0, 0.0, -1e300, 2.0, 1e38],
}


@pytest.mark.parametrize("vocab", [1, 2, 17, 256, 600])
def test_hostile_logits_give_a_token_in_range(vocab):
    rng = np.random.default_rng(vocab)
    for case in range(200):
        # From a few hostile values, from many, or any bits at all.
        values = rng.choice(HOSTILE, size=[1, 2, 5, 12][case % 4]).astype(np.float32)
        logits = rng.choice(values, size=vocab)
        if case % 5 == 0:
            logits = rng.integers(0, 2**32, vocab, dtype=np.uint32).view(np.float32)
        params = SamplingParams(**{k: rng.choice(v).item() for k, v in HOSTILE_PARAMS.items()})
        made = sampler(params, vocab, context=[0, vocab - 1], answer=[vocab // 2])
        token = made.sample(logits, case)
        assert 0 <= token < vocab
        assert made.sample(logits, case) == token
        # Masked tokens and NaN are not drawn while another can be.
        if not may_overflow(params) and np.isfinite(logits).any():
            assert logits[token] > -np.inf


def may_overflow(params: SamplingParams) -> bool:
    """Whether penalties may turn a finite logit into an infinite one."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0


@pytest.mark.parametrize("case", range(60))
def test_any_logits_match_the_reference(case):
    rng = np.random.default_rng(case)
    scale = np.float32(rng.choice([1, 9]))
    logits = rng.normal(size=rng.integers(1, 700)).astype(np.float32) * scale
    if case % 2:
        logits = np.round(logits)  # many ties
    changes = {"temperature": float(rng.uniform(0.2, 3)), "top_k": int(rng.integers(0, 800))}
    top_p = float(rng.uniform(0.01, 0.99))
    # The cut must not hang on rounding.
    share = np.cumsum(kept_tokens(logits, SamplingParams(**changes))[1])
    if np.abs(share - top_p).min() > 1e-5:
        assert_draws_match(logits, SamplingParams(top_p=top_p, **changes), draws=50)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(4, np.float32),
        np.zeros((1, 5), np.float32),
        np.zeros(5, np.float64),
        np.zeros(10, np.float32)[::2],
        np.zeros(5, ">f4"),
    ],
    ids=["short", "2-d", "float64", "strided", "big-endian"],
)
def test_wrong_logits_are_refused(array):
    made = sampler(SamplingParams(), 5)
    with pytest.raises((TypeError, _native.NativeError)):
        made.sample(array, 0)


@pytest.mark.parametrize("token", [-1, 5, 2**31 - 1])
def test_unknown_ids_are_refused(token):
    for params in (SamplingParams(), SamplingParams(repetition_penalty=1.1)):
        with pytest.raises(_native.NativeError, match="outside the vocabulary"):
            sampler(params, 5, context=[token])
        with pytest.raises(_native.NativeError, match="outside the vocabulary"):
            sampler(params, 5, answer=[token])


def test_native_parameters_are_checked():
    good = {"vocab": 5, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    good |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "seed": 0}
    _native.Sampler(**good)
    for name, value in [
        ("vocab", 0),
        ("vocab", 2**31),
        ("temperature", -1.0),
        ("top_k", -1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", float("inf")),
    ]:
        with pytest.raises(_native.NativeError, match=name):
            _native.Sampler(**good | {name: value})


def test_large_vocabulary_is_fast():
    """0.3 ms is the contract; ten times that still tells selection from sorting and from numpy."""
    logits = rng_logits("flat", 129280)
    made = sampler(SamplingParams(temperature=0.6, top_p=0.95), len(logits))
    seconds = []
    for position in range(30):
        start = time.perf_counter()
        made.sample(logits, position)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 3e-3
