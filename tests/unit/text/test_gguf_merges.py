import hashlib
import os

import numpy as np
import pytest

from moechat.text import gguf_merges
from moechat.text.gguf_merges import derive_merges, merges_by_score

TOKENS = ["a", "b", "ab", "ba", "aba", "aa", "aaa"]
SCORES = np.array([-9, -9, -2, -1, -3, -4, -4], np.float32)
MERGES = [("b", "a"), ("a", "b"), ("ab", "a"), ("a", "ba"), ("aa", "a"), ("a", "aa"), ("a", "a")]


def test_every_way_to_split_a_token_is_a_merge_and_the_best_score_comes_first():
    assert merges_by_score(TOKENS, SCORES, None) == MERGES


def test_a_vocabulary_may_have_nothing_to_merge():
    assert merges_by_score(["a", "b"], SCORES[:2], None) == []
    assert merges_by_score([], SCORES[:0], None) == []


def test_a_very_long_token_takes_no_time():
    tokens = ["a", "aa", "a" * 10_000_000]
    assert merges_by_score(tokens, np.zeros(3, np.float32), None) == [("a", "a")]


@pytest.fixture
def cache(tmp_path):
    """A cache folder with the merges of TOKENS in it."""
    folder = tmp_path / "below" / "cache"
    assert merges_by_score(TOKENS, SCORES, folder) == MERGES
    return folder


@pytest.fixture
def derivations(monkeypatch):
    """One entry for each time that merges are derived anew."""
    calls = []

    def counted(*arguments):
        calls.append(1)
        return derive_merges(*arguments)

    monkeypatch.setattr(gguf_merges, "derive_merges", counted)
    return calls


def test_merges_are_derived_once(cache, derivations):
    assert merges_by_score(TOKENS, SCORES, cache) == MERGES
    assert derivations == [] and len(list(cache.iterdir())) == 1
    assert merges_by_score(TOKENS, SCORES + 1, cache) == MERGES
    assert merges_by_score(TOKENS[:3], SCORES[:3], cache) == [("a", "b")]
    assert len(derivations) == 2 and len(list(cache.iterdir())) == 3


def resealed(body):
    return hashlib.blake2b(body, digest_size=32).digest() + body


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content[:40] + b"\1" + content[41:],
        lambda content: resealed(np.array([[0, 7]], "<i4").tobytes()),
        lambda content: resealed(np.array([[-1, 1]], "<i4").tobytes()),
        lambda content: resealed(bytes(4)),
    ],
)
def test_a_damaged_file_is_made_again(cache, derivations, damage):
    (path,) = cache.iterdir()
    good = path.read_bytes()
    path.write_bytes(damage(good))
    assert merges_by_score(TOKENS, SCORES, cache) == MERGES
    assert len(derivations) == 1 and path.read_bytes() == good
    assert list(cache.iterdir()) == [path]


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    assert merges_by_score(TOKENS, SCORES, tmp_path / "file") == MERGES

    def full_disk(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    folder = tmp_path / "cache"
    assert merges_by_score(TOKENS, SCORES, folder) == MERGES
    assert list(folder.iterdir()) == []
