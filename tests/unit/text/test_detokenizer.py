from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moechat.text.detokenizer import Detokenizer
from moechat.text.tokenizer import Tokenizer


def test_fixture_streams(deepseek: Tokenizer, expected: dict[str, Any]) -> None:
    cases = [case for case in expected["stream"] if case["skip_special_tokens"]]
    assert len(cases) > 20
    for case in cases:
        detokenizer = Detokenizer(deepseek)
        increments = [detokenizer.push(token_id) for token_id in case["ids"]]
        rest = detokenizer.flush()
        assert "".join(increments) + rest == case["text"], case["name"]
        if not case["name"].endswith("/not-utf8"):
            assert (increments, rest) == (case["increments"], case["flush"]), case["name"]


def test_hidden_and_unknown_ids_give_no_text(deepseek: Tokenizer) -> None:
    user = deepseek.added_tokens["<｜User｜>"]
    assert Detokenizer(deepseek).push(user) == "<｜User｜>"  # not flagged special
    assert Detokenizer(deepseek, hidden=frozenset({user})).push(user) == ""
    assert Detokenizer(deepseek).push(deepseek.vocab_size + 5) == ""


def test_hidden_id_inside_a_character(deepseek: Tokenizer) -> None:
    first, second = (deepseek.token_id(character) for character in "Ãł")
    assert first is not None and second is not None
    detokenizer = Detokenizer(deepseek)
    assert [detokenizer.push(i) for i in (first, 1, second)] == ["", "", "à"]


def test_decoder_that_is_not_byte_level(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "▁Hi": 1, "▁you": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [{"id": 0, "content": "<unk>", "special": True}],
                "decoder": {
                    "type": "Sequence",
                    "decoders": [
                        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                        {"type": "ByteFallback"},
                        {"type": "Fuse"},
                        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                    ],
                },
                "model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": True},
            }
        )
    )
    detokenizer = Detokenizer(Tokenizer.open(tmp_path))
    emoji = [3 + byte for byte in "👍".encode()]
    texts = [detokenizer.push(i) for i in (1, 0, 2, *emoji, 2, *emoji[:2])]
    assert texts == ["Hi", "", " you", "", "", "", "👍", " you", "", ""]
    assert set(detokenizer.flush()) == {"\ufffd"}
