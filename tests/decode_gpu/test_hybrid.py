"""Hybrid decode on torch's CPU device: against transformers, CPU decode, and itself."""

from __future__ import annotations

import functools
import threading

import numpy as np
import pytest
from draft_models import agreeing_folder
from oracles import MINI, ORACLE_NAMES, PIPELINE_ORACLES, expected, oracle_folder
from session_record import answer, kv_bytes

from moechat import SamplingParams, _native
from moechat.prefill.cpu import CpuPrefill

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")
from hybrid_engine import with_hybrid  # noqa: E402

from moechat.decode.gpu import device_cache, lane_choice  # noqa: E402

MARGIN = 0.25
TOKENS = 24


pytestmark = pytest.mark.usefixtures("one_torch_thread")


@functools.cache
def want(name: str) -> dict[str, np.ndarray]:
    return expected(oracle_folder(name))


def greedy(session, ids, max_tokens=TOKENS):
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_end=True)
    return [e.token_id for e in session.generate(ids, params) if e.token_id is not None]


@pytest.mark.parametrize("name", ORACLE_NAMES)
def test_exact_mode_gives_the_tokens_of_transformers(open_engine, name):
    folder = oracle_folder(name)
    engine = open_engine(folder, compute="exact")
    with_hybrid(engine, folder)
    for prompt in range(2):
        session = engine.session()
        tokens = greedy(session, want(name)[f"prompt_{prompt}_ids"].tolist())
        assert tokens == want(name)[f"prompt_{prompt}_greedy"].tolist()


def rerouted(engines, ids):
    """Positions at which default mode chooses other experts than exact mode, in any layer."""
    chosen = []
    for engine in engines:
        span = CpuPrefill(engine.model.native, _native.ThreadPool(1), engine.session().cache, ids)
        layers = [span.run_layer(_native.CancelFlag()) for _ in engine.spec.layers]
        chosen.append([np.sort(layer.router_ids_TK, axis=1) for layer in layers])
    return np.any([(a != b).any(axis=1) for a, b in zip(*chosen)], axis=0)


@pytest.mark.parametrize("name", ORACLE_NAMES)
def test_default_mode_gives_the_tokens_of_the_cpu(open_engine, name):
    """Up to a choice that is not clear in the CPU's own logits.

    As in test_oracles.py a router's near tie may flip one clear choice of a folder.
    """
    folder = oracle_folder(name)
    engine, plain = open_engine(folder), open_engine(folder)
    with_hybrid(engine, folder)
    compared = flips = 0
    for prompt in range(3):
        ids = want(name)[f"prompt_{prompt}_ids"].tolist()
        ours, theirs = (greedy(e.session(), ids) for e in (engine, plain))
        same = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), len(ours))
        compared += same
        if same == len(ours):
            continue
        chain = ids + theirs[:same]
        logits = np.sort(plain.session().extend(chain, logits="last")[0])
        if logits[-1] - logits[-2] >= MARGIN:
            assert rerouted((plain, open_engine(folder, compute="exact")), chain)[-1]
            flips += 1
    assert compared >= TOKENS and flips <= 1


def seeded(engine, seed, length=None):
    random = np.random.default_rng(seed)
    length = length or int(random.integers(2, 40))
    return random.integers(3, engine.spec.vocab_size, length).tolist()


def params(seed, max_tokens=TOKENS):
    """Greedy for even seeds, sampled for odd ones."""
    return SamplingParams(
        temperature=seed % 2, seed=seed, max_tokens=max_tokens, ignore_end=True,
    )  # fmt: skip


@pytest.mark.parametrize("anti_phase", [True, False, None])
@pytest.mark.parametrize(
    "folder", [MINI, *map(oracle_folder, PIPELINE_ORACLES[:1] + PIPELINE_ORACLES[2:])]
)
def test_no_bit_depends_on_who_decodes_beside(open_engine, folder, anti_phase, monkeypatch):
    monkeypatch.setattr(lane_choice, "TRIAL_STEPS", 1)
    monkeypatch.setattr(lane_choice, "KEPT_STEPS", 2)
    engine = open_engine(folder)
    hybrid = with_hybrid(engine, folder, anti_phase=anti_phase)
    assert len(hybrid.lanes) == (1 if anti_phase is False else 2)
    alone = {}
    for seed in range(5):
        session = engine.session()
        tokens, reason = answer(session, seeded(engine, seed), params(seed, 4 + seed))
        assert reason == "length" and len(tokens) == 4 + seed
        alone[seed] = tokens, kv_bytes(session)
        session.close()
    together = {}

    def run(seed):
        session = engine.session()
        tokens, _ = answer(session, seeded(engine, seed), params(seed, 4 + seed))
        together[seed] = tokens, kv_bytes(session)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert together == alone


@pytest.mark.parametrize("name", PIPELINE_ORACLES)
def test_rewinds_and_long_answers(open_engine, monkeypatch, name):
    """The copy on the device grows, is cut and filled again."""
    monkeypatch.setattr(device_cache, "_LEAST_SLOTS", 64)
    folder = oracle_folder(name)
    engine, fresh = (open_engine(folder, compute="exact") for _ in range(2))
    caches = with_hybrid(engine, folder).caches
    with_hybrid(fresh, folder)
    session = engine.session()
    answer(session, seeded(engine, 1, 100), params(0, 40))  # beyond the first slots
    assert caches.version > 0 or all(caches._windows)
    for keep, seed in ((120, 2), (30, 3), (0, 5)):
        session.rewind(keep)
        ids = seeded(engine, seed, 21)
        before = list(session.timeline.ids)
        tokens, _ = answer(session, ids, params(0, 12))
        other = fresh.session()
        assert tokens == answer(other, before + ids, params(0, 12))[0]
        other.close()


def test_no_bit_depends_on_who_speculates_beside(open_engine):
    """Drafts are verified by the CPU, whose bits are others than the device's."""
    folder = agreeing_folder()
    engine = open_engine(folder, speculate=True)
    with_hybrid(engine, folder)

    def record(beside):
        session = engine.session()
        session.drafter = None
        if beside:
            drafting = engine.session().generate(seeded(engine, 4), params(4, 60))
            next(drafting)
        tokens, _ = answer(session, seeded(engine, 1), params(1))
        if beside:
            assert drafting.result().stats.drafted > 0
        return tokens, kv_bytes(session)

    alone = record(False)
    assert record(True) == alone
