"""The probe: what crosses how, what passes, and who uses the verdict."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import fake_engine
import numpy as np
import pytest
from fake_engine import FakeEngine

import moechat
from moechat import Engine
from moechat.engine.kv_choice import known_verdict, named_policy, verdict_key
from moechat.errors import BadParameter, Usage
from moechat.eval import command
from moechat.eval import probe as probe_module
from moechat.eval.probe import divergence_nats, harshest_policy, probe
from moechat.kv.layout import KVLayout, Part
from moechat.kv.policy import best_num_tiers
from moechat.kv.tiers import DROPPED, Tier
from moechat.kv.verdict import Verdict, store_verdict

GROUPED = KVLayout((Part(0, 64, "key"), Part(64, 64, "value")))
LATENT = KVLayout((Part(0, 128, "latent"), Part(128, 32, "rotary")))
MINI = Path(moechat.__file__).parent / "data" / "mini"
PASSED = Verdict(3, (True,) * 3, (True,) * 3, 0.01, 1020, "2026-01-31")
VOCAB = 3000


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path / "home"))


class Probed(FakeEngine):
    """Misses the needles whose numbers are given, by policy."""

    trained_context_tokens = 4096

    def __init__(self, **misses):
        super().__init__(self._answer)
        self.misses, self.asked = misses, []
        self.first_policy = self.kv_policy
        self.model = SimpleNamespace(files=SimpleNamespace(path=Path("/nowhere"), weight_files=[]))

    def _answer(self, session):
        name = self.kv_policy.name
        number = self.asked.count(name)
        self.asked.append(name)
        code = re.findall(r"\d{5}", self.text.tokenizer.decode(session.ids))[-1]
        return "nothing" if number in self.misses.get(name, ()) else f"It is {code}"


@pytest.fixture
def fake(monkeypatch):
    def policy(name, *_, **__):
        return SimpleNamespace(name=name, bytes=8, logit=6.0 if name == "native" else 5.0)

    monkeypatch.setattr(fake_engine.FakeSession, "vocab", VOCAB)
    monkeypatch.setattr(probe_module, "make_policy", policy)
    monkeypatch.setattr(KVLayout, "of", lambda spec: GROUPED)
    return Probed


def run(engine):
    return probe(engine, lambda line: None)


def test_all_needles_found_allows_int4(fake):
    engine = fake()
    found = run(engine)
    assert (found.num_tiers, found.trials, found.native_trials) == (4, (True,) * 3, (True,) * 3)
    assert found.conclusive and found.kl_tokens == 1020
    assert engine.asked == ["native", "spectrum"] * 3
    assert engine.kv_policy is engine.first_policy and engine.sessions[0].closed


@pytest.mark.parametrize("miss", [0, 1, 2])
def test_one_needle_missed_is_enough(fake, miss):
    found = run(fake(spectrum={miss}))
    assert found.num_tiers == 2 and found.conclusive
    assert found.trials == tuple(number != miss for number in range(3))


def test_a_model_that_fails_anyway_proves_nothing(fake):
    found = run(fake(spectrum={0}, native={1}))
    assert (found.num_tiers, found.conclusive) == (2, False)
    assert found.native_trials == (True, False, True)


def test_the_divergence_is_that_of_the_tokens_behind_what_crossed(fake):
    engine = fake()
    found = run(engine)

    def shares(logit):
        weight = np.exp(np.longdouble(logit))
        return weight / (weight + VOCAB - 1), 1 / (weight + VOCAB - 1)

    (p, rest_p), (q, rest_q) = shares(6), shares(5)
    expected = p * np.log(p / q) + (VOCAB - 1) * rest_p * np.log(rest_p / rest_q)
    assert found.kl_nats == pytest.approx(float(expected), rel=1e-9)
    calls = engine.sessions[0].calls
    scored = [ids for kind, ids in calls if kind == "all"]
    assert [len(ids) for ids in scored] == [340] * 6
    assert scored[0] == scored[1] and scored[0] != scored[2]
    crossed = [ids for kind, ids in calls if kind is None]
    assert crossed[0] == crossed[1] and 1950 < len(crossed[0]) < 2000
    behind = [calls[i - 1] for i, (kind, _) in enumerate(calls) if kind == "all"]
    assert behind == [("rewind", len(ids)) for ids in crossed]


def test_an_interruption_leaves_the_engine_as_it_was(fake):
    engine, calls = fake(), []

    def check(session):
        calls.append(engine.kv_policy.name)
        if calls[-1] == "spectrum":
            raise KeyboardInterrupt

    engine.check = check
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    assert engine.kv_policy is engine.first_policy and engine.sessions[0].closed


def test_a_context_that_was_cut_is_not_probed(fake):
    engine = fake()
    engine.context_tokens = 2339
    with pytest.raises(Usage, match="2,339 tokens; 2,340 are needed"):
        run(engine)
    engine.trained_context_tokens = 2339  # all that the model has
    assert run(engine).kl_tokens == 1020
    crossed = [ids for kind, ids in engine.sessions[0].calls if kind is None]
    assert 1950 < len(crossed[0]) < 2339 - 340


def test_divergence_by_its_definition():
    draw = np.random.default_rng(1)
    first, other = draw.standard_normal((2, 150, 40)).astype(np.float32) * 5
    p, q = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in np.longdouble([first, other]))
    assert divergence_nats(first, other) == pytest.approx(float((p * np.log(p / q)).sum()), 1e-12)
    assert divergence_nats(first, first) == 0
    apart = np.array([[3e4, -3e4]], np.float32)
    assert divergence_nats(apart, -apart) == 6e4


@pytest.mark.parametrize("layout", [GROUPED, LATENT])
def test_the_harshest_setting_is_nearly_all_int4_and_drops_nobody(layout):
    policy = harshest_policy(layout)
    mass_n = np.random.default_rng(1).random(2000, np.float32)
    tiers = policy.tiers(0, 0, 2000, mass_n)
    assert DROPPED not in tiers
    assert np.mean(tiers == Tier.INT4) > 0.85


@pytest.mark.parametrize("dim", range(2, 12))
def test_the_harshest_setting_drops_nobody_of_narrow_heads_either(dim):
    """Scales make INT4 dearer than the budget there, and the cost is no binary fraction."""
    layout = KVLayout((Part(0, dim, "key"), Part(dim, dim, "value")))
    for num_tokens in (1, 100, 731, 1500, 1960):
        assert harshest_policy(layout).plan(0, 0, num_tokens).num_dropped == 0


def test_a_small_probe_of_mini(monkeypatch, open_engine):
    monkeypatch.setattr(probe_module, "DOCUMENT_TOKENS", 300)
    monkeypatch.setattr(probe_module, "SCORED_TOKENS", 40)
    engine = open_engine(MINI)
    found = run(engine)
    assert found.num_tiers == 3 and all(found.trials) and all(found.native_trials)
    assert 0 < found.kl_nats < 0.1 and found.kl_tokens == 120
    assert engine.kv_policy.name == "native"


@pytest.mark.parametrize(("layout", "best"), [(GROUPED, 4), (LATENT, 3)])
def test_the_verdict_decides_on_the_tiers_of_spectrum(monkeypatch, tmp_path, layout, best):
    monkeypatch.setattr(KVLayout, "of", lambda spec: layout)
    assert best_num_tiers(layout) == best
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    files = SimpleNamespace(path=tmp_path, weight_files=[weights])

    def lowest():
        return named_policy("spectrum", 0.5, None, files).ladder.tiers

    assert named_policy("spectrum", 0.5, None).ladder.tiers == lowest() == (Tier.INT8, Tier.FP16)
    store_verdict(verdict_key(files), Verdict(best, (True,), (True,), 0.0, 1, "2026-01-31"))
    assert len(lowest()) == best and lowest()[0] == Tier.INT4
    (tmp_path / "config.json").write_text("{}")  # another model
    assert known_verdict(files) is None and lowest()[0] == Tier.INT8


class Opened(SimpleNamespace):
    """An engine as far as settle_tiers looks at it."""

    def __init__(self, path):
        super().__init__(spec=None, kv_policy=None)
        self.model = SimpleNamespace(files=SimpleNamespace(path=path, weight_files=[]))

    def settle(self, monkeypatch, outcome):
        """The lowest tier, how often the probe ran, and what stood on stderr."""
        ran, stderr = [], io.StringIO()

        def scripted(engine, show):
            ran.append(engine)
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        monkeypatch.setattr(KVLayout, "of", lambda spec: LATENT)
        monkeypatch.setattr(command, "probe", scripted)
        monkeypatch.setattr(sys, "stderr", stderr)
        command.settle_tiers(self, 0.4)
        assert self.kv_policy.budget == 0.4
        return self.kv_policy.ladder.tiers[0], len(ran), stderr.getvalue()


def test_the_probe_runs_once(monkeypatch, tmp_path):
    engine = Opened(tmp_path)
    lowest, ran, said = engine.settle(monkeypatch, PASSED)
    assert (lowest, ran) == (Tier.INT4, 1) and "Ctrl-C" in said and PASSED.text in said
    assert engine.settle(monkeypatch, PASSED) == (Tier.INT4, 0, "")


def test_a_verdict_that_is_damaged_or_cannot_be_kept_is_told(monkeypatch, tmp_path):
    engine = Opened(tmp_path)
    engine.settle(monkeypatch, PASSED)
    (path,) = (tmp_path / "home" / "cache").iterdir()
    path.write_text("{")
    lowest, ran, said = engine.settle(monkeypatch, PASSED)
    assert (lowest, ran) == (Tier.INT4, 1) and f"'{path}' is damaged" in said
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path / "file"))
    for _ in range(2):
        lowest, ran, said = engine.settle(monkeypatch, PASSED)
        assert (lowest, ran) == (Tier.INT4, 1)
        assert said.count("every start probes again: ") == 1 and "Not a directory" in said


@pytest.mark.parametrize(
    ("error", "why"),
    [(KeyboardInterrupt(), "interrupted"), (BadParameter("no text here"), "no text here")],
)
def test_without_a_verdict_two_tiers_are_used(monkeypatch, tmp_path, error, why):
    engine = Opened(tmp_path)
    for _ in range(2):  # nothing is kept
        lowest, ran, said = engine.settle(monkeypatch, error)
        assert (lowest, ran) == (Tier.INT8, 1)
        told = f"KV probe: {why}; two tiers of precision are used, without INT4\n"
        # A latent of 128 and a rotary key of 32: 194 of 320 bytes in INT8.
        assert said.endswith(f"{told}KV probe: --kv-budget 0.4 now drops tokens; 0.61 drops none\n")


def test_eval_probe_keeps_what_it_found_and_an_interruption_nothing(monkeypatch, capsys):
    from moechat.cli.app import main

    def outcome(engine, show):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "probe", outcome)
    assert main(["eval", "probe", "mini", "--json"]) == 130
    with Engine.open("mini") as engine:
        assert known_verdict(engine.model.files) is None
    monkeypatch.setattr(command, "probe", lambda engine, show: PASSED)
    assert main(["eval", "probe", "mini"]) == 0
    assert PASSED.text in capsys.readouterr().out
    with Engine.open("mini") as engine:
        assert known_verdict(engine.model.files) == PASSED
