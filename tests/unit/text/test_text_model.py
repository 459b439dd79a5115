"""The text side of a model opened from other sources than a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers

from moechat.engine.text import TextModel
from moechat.errors import CheckpointDamaged, TextUnavailable
from moechat.messages import Turn


@pytest.fixture(scope="module")
def library(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


CONFIG = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": {"content": "<|EOT|>"}}
SOURCE = "{{ bos_token }}{% for m in messages %}{{ m.content }}<｜User｜>{% endfor %}"


def test_from_parts(library: tokenizers.Tokenizer) -> None:
    for text in (
        TextModel.from_parts(library, CONFIG, SOURCE, origin="a.gguf"),
        TextModel.from_parts(library, {**CONFIG, "chat_template": SOURCE}, origin="a.gguf"),
    ):
        a = text.tokenizer.encode("a")
        assert text.template.encode([Turn("user", "a")]) == [0, *a, 128803]
        assert text.end_ids == (128803, 128805)  # what the template writes, then the eos token


def test_parts_that_lack_something(library: tokenizers.Tokenizer) -> None:
    with pytest.raises(TextUnavailable, match=r"a\.gguf has no chat template"):
        TextModel.from_parts(library, CONFIG, origin="a.gguf")
    with pytest.raises(CheckpointDamaged, match=r"the chat template in a\.gguf cannot be read"):
        TextModel.from_parts(library, CONFIG, "{% if %}", origin="a.gguf")
    bare = TextModel.from_parts(library, {"eos_token": "no such token"}, "a", origin="a.gguf")
    assert bare.end_ids == ()


def test_a_folder_and_its_parts_are_the_same(folder: Path, library: tokenizers.Tokenizer) -> None:
    opened = TextModel.open(folder)
    parts = TextModel.from_parts(
        library, {"eos_token": "<｜end▁of▁sentence｜>"}, opened.template.source, origin="x"
    )
    assert opened.end_ids == parts.end_ids == (1,)
    assert opened.template.control_ids == parts.template.control_ids
