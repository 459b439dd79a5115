"""The probe's verdict: kept by model and engine, and never believed when it is damaged."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from moechat.folders import cache_folder
from moechat.kv import verdict as verdict_module
from moechat.kv.verdict import (
    Verdict,
    fingerprint,
    load_verdict,
    store_verdict,
    verdict_damage,
)

PASSED = Verdict(3, (True,) * 3, (True,) * 3, 0.0023, 1020, "2026-01-31")


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path / "home"))


@pytest.fixture
def files(tmp_path):
    found = [tmp_path / name for name in ("a.safetensors", "config.json")]
    found[0].write_bytes(bytes(1_000_000))
    found[1].write_bytes(b"{}")
    return found


def test_what_was_stored_is_loaded_and_nothing_else_is():
    assert load_verdict("one") is None
    other = replace(PASSED, num_tiers=2, trials=(True, False, True))
    assert not store_verdict("one", PASSED) and not store_verdict("two", other)
    assert (load_verdict("one"), load_verdict("two")) == (PASSED, other)
    assert not store_verdict("one", other) and load_verdict("one") == other
    assert len(list(cache_folder().iterdir())) == 2, "a temporary file was left"


@pytest.mark.parametrize(
    "damage",
    [
        {"num_tiers": 5},
        {"num_tiers": True},
        {"num_tiers": "3"},
        {"num_tiers": [3]},
        {"trials": [True, False, True]},  # not passed, yet three tiers
        {"trials": []},
        {"trials": [1, 1, 1]},
        {"trials": None},
        {"trials": [True] * 101},
        {"native_trials": "yes"},
        {"kl_nats": -1},
        {"kl_nats": float("nan")},
        {"kl_nats": 10**400},  # no float64
        {"kl_nats": None},
        {"kl_tokens": 1.5},
        {"date": "\x1b[31m"},
        {"date": 1},
        {"more": 1},
    ],
)
def test_a_damaged_verdict_is_none(damage):
    store_verdict("it", PASSED)
    (path,) = cache_folder().iterdir()
    assert not verdict_damage("it") and not verdict_damage("other")
    path.write_text(json.dumps(PASSED.keys() | damage))
    assert load_verdict("it") is None
    assert verdict_damage("it") == f"'{path}' is damaged"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff", b"[" * 5000, b" " * 20000])
def test_a_file_of_something_else_is_none(content):
    store_verdict("it", PASSED)
    (path,) = cache_folder().iterdir()
    path.write_bytes(content)
    assert load_verdict("it") is None and "is damaged" in verdict_damage("it")


def test_a_verdict_that_cannot_be_read_is_told():
    store_verdict("it", PASSED)
    (path,) = cache_folder().iterdir()
    path.unlink()
    path.mkdir()
    assert load_verdict("it") is None
    assert verdict_damage("it") == f"'{path}': Is a directory"


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path / "file"))
    assert store_verdict("it", PASSED) == f"'{tmp_path / 'file' / 'cache'}': Not a directory"
    assert load_verdict("it") is None and not verdict_damage("it")
    monkeypatch.delenv("MOECHAT_HOME")
    for variable, value in (("XDG_CACHE_HOME", ""), ("HOME", "nowhere")):
        monkeypatch.setenv(variable, value)
    assert store_verdict("it", PASSED) == "no home folder is known, HOME is not set"
    assert not verdict_damage("it")


def test_another_engine_or_model_has_another_fingerprint(monkeypatch):
    before = fingerprint("files")
    assert fingerprint("others") != before
    monkeypatch.setattr(verdict_module, "_ENGINE", (*verdict_module._ENGINE, "more"))
    assert fingerprint("files") != before


def test_people_are_told_what_was_found():
    assert PASSED.text == (
        "INT4 allowed (3 tiers): needles 3 of 3, with native KV 3; KL 0.0023 nats a token over "
        "1,020 tokens; 2026-01-31"
    )
    failed = replace(PASSED, num_tiers=2, trials=(True, False, True))
    assert failed.conclusive and failed.text.startswith("no INT4 (2 tiers): needles 2 of 3, with")
    vain = replace(failed, native_trials=(True, True, False))
    assert not vain.conclusive and "with native KV 2, which proves nothing; KL" in vain.text
