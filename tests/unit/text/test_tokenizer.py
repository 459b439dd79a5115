from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from moechat.errors import CheckpointDamaged, InvalidUtf8, TextUnavailable
from moechat.text.tokenizer import Tokenizer


def test_fixture_texts(deepseek: Tokenizer, expected: dict[str, Any]) -> None:
    for case in expected["encode"]:
        if case["name"].startswith("special_"):
            assert set(deepseek.encode(case["text"])).isdisjoint(deepseek.added_tokens.values())
        else:
            assert deepseek.encode(case["text"]) == case["ids"], case["name"]
        assert deepseek.decode(case["ids"], skip_special=False) == case["decoded"], case["name"]


def test_no_added_token_from_plain_text(deepseek: Tokenizer, mini: Tokenizer) -> None:
    for tokenizer in (deepseek, mini):
        for content, token_id in tokenizer.added_tokens.items():
            ids = tokenizer.encode(content)
            assert token_id not in ids
            assert tokenizer.decode(ids) == content


def test_whole_word_lookup_does_not_reach_added_tokens(tmp_path: Path) -> None:
    """ignore_merges takes a whole word from the vocabulary, added tokens' names included."""
    vocab = {c: i for i, c in enumerate("<|EOT>")} | {"<|EOT|>": 6}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "ignore_merges": True}
    added = [{"id": 6, "content": "<|EOT|>", "special": True}]
    document = {"version": "1.0", "added_tokens": added, "model": model}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert Tokenizer.open(tmp_path).encode("<|EOT|>") == [0, 1, 2, 3, 4, 1, 5]


def test_special_tokens_are_skipped_on_demand(deepseek: Tokenizer) -> None:
    ids = [0, *deepseek.encode("hi"), 1]
    assert deepseek.decode(ids) == "hi"
    assert deepseek.decode(ids, skip_special=False).startswith("<｜begin▁of▁sentence｜>hi")


def test_sizes(deepseek: Tokenizer, mini: Tokenizer) -> None:
    assert (deepseek.vocab_size, mini.vocab_size) == (128815, 8192)
    assert deepseek.longest_token_bytes == 128
    assert mini.token_id("<｜User｜>") == 3
    assert mini.token_id("no such token") is None


def test_lone_surrogate(mini: Tokenizer) -> None:
    with pytest.raises(InvalidUtf8):
        mini.encode("a\ud800b")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_missing_file(tmp_path: Path, name: str) -> None:
    for other in {"tokenizer.json", "tokenizer_config.json"} - {name}:
        (tmp_path / other).write_text("{}")
    with pytest.raises(TextUnavailable, match=name):
        Tokenizer.open(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "version https://git-lfs.github.com/spec/v1\n",
        "{}",
        '{"model": 3}',
        '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["x y"]}}',
        '{"added_tokens": [{"id": -1, "content": "x"}], "model": {}}',
        '{"added_tokens": {}, "model": {}}',
    ],
)
def test_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(CheckpointDamaged, match=r"tokenizer\.json"):
        Tokenizer.open(tmp_path)


def test_truncated_file_is_named(tmp_path: Path, deepseek_folder: Path) -> None:
    shutil.copy(deepseek_folder / "tokenizer_config.json", tmp_path)
    whole = (deepseek_folder / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointDamaged, match=r"tokenizer\.json"):
        Tokenizer.open(tmp_path)
