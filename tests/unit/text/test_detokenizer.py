from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models

from moechat.text.chat_template import ChatTemplate
from moechat.text.detokenizer import Detokenizer
from moechat.text.tokenizer import Tokenizer


def joined(detokenizer: Detokenizer, ids: list[int]) -> str:
    return "".join([detokenizer.push(token_id) for token_id in ids]) + detokenizer.flush()


def test_recorded_streams(tokenizer: Tokenizer, cases: dict[str, Any]) -> None:
    assert len(cases["stream"]) == 29
    for case in cases["stream"]:
        detokenizer = Detokenizer(tokenizer, skip_special=case["skip_special_tokens"])
        increments = [detokenizer.push(token_id) for token_id in case["ids"]]
        tail = detokenizer.flush()
        assert "".join(increments) + tail == case["text"], case["name"]
        if not case["name"].endswith("/not-utf8"):
            assert (increments, tail) == (case["increments"], case["flush"]), case["name"]


def test_random_ids_join_to_the_library_decode(tokenizer: Tokenizer) -> None:
    draw = random.Random(2)
    byte_ids = [id_ for id_ in range(3, 800) if len(tokenizer.token(id_) or "") == 1]
    assert len(byte_ids) > 200  # so that most sequences are no UTF-8
    for _ in range(2000):
        ids = [
            draw.choice(byte_ids) if draw.random() < 0.7 else draw.randrange(129_300)
            for _ in range(draw.randint(0, 12))
        ]
        for skip in True, False:
            assert joined(Detokenizer(tokenizer, skip_special=skip), ids) == tokenizer.decode(
                ids, skip_special=skip
            ), ids


def test_control_tokens_are_never_printed(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    detokenizer = Detokenizer(tokenizer, hidden=template.control_ids)
    ids = tokenizer.encode_with_added_tokens(
        "a<｜tool▁calls▁begin｜>b<｜User｜>c<｜fim▁hole｜>d<|EOT|>"
    )
    assert joined(detokenizer, ids) == "abcd"


def test_a_control_token_does_not_part_a_character(
    tokenizer: Tokenizer, template: ChatTemplate
) -> None:
    first, second = tokenizer.token_id("Ã"), tokenizer.token_id("©")
    assert first is not None and second is not None
    detokenizer = Detokenizer(tokenizer, hidden=template.control_ids)
    assert [detokenizer.push(id_) for id_ in (first, 128803, second)] == ["", "", "é"]


PIECES = ["▁", "a", "▁a", "é", "▁word"]


def sentencepiece(folder: Path, *others: decoders.Decoder) -> Tokenizer:
    """`▁` for a space, bytes as `<0xNN>`, and ``others`` after the usual decoders."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    library = tokenizers.Tokenizer(
        models.BPE({name: id_ for id_, name in enumerate(names)}, [], byte_fallback=True)
    )
    usual = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*usual, *others])
    library.save(str(folder / "tokenizer.json"))
    return Tokenizer.open(folder)


DECODERS = {
    "gemma": [],
    "llama": [decoders.Strip(" ", 1, 0)],
    "other": [decoders.Replace("#", "#")],
}


@pytest.mark.parametrize("name", DECODERS)
def test_other_decoders_join_to_the_library_decode(tmp_path: Path, name: str) -> None:
    tokenizer = sentencepiece(tmp_path, *DECODERS[name])
    assert not tokenizer.is_byte_level
    assert (tokenizer.byte_fallback is None) == (name == "other")
    draw = random.Random(3)
    for _ in range(500):
        text = "".join(draw.choices(["a", " a", "é", " word", " ", "🙂", "龘"], k=12))
        ids: list[int] = []
        for character in text.replace(" ", "▁"):
            known = tokenizer.token_id(character)
            ids += (
                [1 + byte for byte in character.encode()]
                if known is None or draw.random() < 0.3
                else [known]
            )
        detokenizer = Detokenizer(tokenizer)
        increments = [detokenizer.push(token_id) for token_id in ids]
        assert "\ufffd" not in "".join(increments)
        assert "".join(increments) + detokenizer.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize(("name", "shown"), [("llama", 1), ("other", 3)])
def test_other_decoders_flush_a_cut_character(tmp_path: Path, name: str, shown: int) -> None:
    detokenizer = Detokenizer(sentencepiece(tmp_path, *DECODERS[name]))
    increments = [detokenizer.push(1 + byte) for byte in "🙂".encode()[:3]]
    assert increments == ["", "", ""]
    assert detokenizer.flush() == "\ufffd" * shown
    assert detokenizer.flush() == ""


def test_other_decoders_keep_a_short_window(tmp_path: Path) -> None:
    detokenizer = Detokenizer(sentencepiece(tmp_path, *DECODERS["other"]))
    longest = 0
    for _ in range(500):  # nothing but stray bytes: never a whole character
        detokenizer.push(1 + 0x80)
        longest = max(longest, len(detokenizer._decoder._ids))  # type: ignore[union-attr]
    assert longest <= 32
