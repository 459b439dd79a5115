from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from moechat.errors import CheckpointDamaged, InvalidUtf8, TextUnavailable, Usage
from moechat.text import tokenizer as tokenizer_module
from moechat.text.tokenizer import Tokenizer


def test_encodings_of_the_library(tokenizer: Tokenizer, cases: dict[str, Any]) -> None:
    for case in cases["encode"]:
        assert tokenizer.encode_with_added_tokens(case["text"]) == case["ids"], case["name"]
        assert tokenizer.decode(case["ids"], skip_special=False) == case["decoded"], case["name"]


def test_plain_text_gives_no_added_token(tokenizer: Tokenizer) -> None:
    added = set(tokenizer.added_tokens.values())
    for content in tokenizer.added_tokens:
        ids = tokenizer.encode(f"a {content} b")
        assert added.isdisjoint(ids), content
        assert tokenizer.decode(ids) == f"a {content} b"


def test_what_it_says_of_its_vocabulary(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 128815
    assert tokenizer.added_tokens["<｜User｜>"] == tokenizer.token_id("<｜User｜>") == 128803
    assert tokenizer.token_id("no such token") is None
    assert 1 in tokenizer.special_ids
    assert 128803 not in tokenizer.special_ids
    assert tokenizer.decode([1, 128803]) == "<｜User｜>"


def test_settings_of_training_time_do_not_cut_or_pad(folder: Path, tmp_path: Path) -> None:
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.enable_truncation(4)
    library.enable_padding(length=9)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.open(tmp_path)
    assert len(tokenizer.encode_with_added_tokens("one two three four five six")) == 6
    assert len(tokenizer.encode_with_added_tokens("one")) == 1


def test_lone_surrogates_are_an_error(tokenizer: Tokenizer) -> None:
    for encode in tokenizer.encode, tokenizer.encode_with_added_tokens:
        with pytest.raises(InvalidUtf8, match="0xd83d, at character 2"):
            encode("é \ud83d")


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TextUnavailable, match=r"no tokenizer\.json"):
        Tokenizer.open(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(TextUnavailable, match=r"Of tokenizer\.model another program"):
        Tokenizer.open(tmp_path)
    os.mkfifo(tmp_path / "tokenizer.json")  # would block when opened
    with pytest.raises(TextUnavailable):
        Tokenizer.open(tmp_path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "EOF"),
        (b"{}", "Model missing"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git-lfs"),
        (b"\xff\xfe{", "UTF-8"),
        (b'{"version": "1.0", "added_tokens": [{"id": -1}]}', "line 1"),
    ],
)
def test_a_damaged_tokenizer(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointDamaged, match=why) as caught:
        Tokenizer.open(tmp_path)
    assert str(tmp_path / "tokenizer.json") in caught.value.what


def test_a_panic_of_the_library_is_an_error() -> None:
    class PanicException(BaseException):
        """As the library's own, which derives from BaseException too."""

    class Library:
        def encode(self, *_: object, **__: object) -> None:
            raise PanicException("retry-limit-in-match over")

    with pytest.raises(Usage, match="retry-limit"):
        tokenizer_module._encode(Library(), "text")  # type: ignore[arg-type]


def test_a_decoder_that_panics_is_an_error() -> None:
    library = tokenizers.Tokenizer(tokenizers.models.BPE({"x": 0}, []))
    library.decoder = tokenizers.decoders.Strip("x", 1, 1)
    tokenizer = Tokenizer(library)
    assert tokenizer.decode([]) == ""
    with pytest.raises(CheckpointDamaged, match="into text"):
        tokenizer.decode([0])


def test_importing_is_light_and_forking_is_silent(folder: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from moechat.text.chat_template import ChatTemplate
from moechat.text.tokenizer import Tokenizer
assert not {"tokenizers", "jinja2", "torch"} & set(sys.modules)
tokenizer = Tokenizer.open(Path(sys.argv[1]))
tokenizer.encode("before the fork " * 1000)
if os.fork() == 0:
    os._exit(len(tokenizer.encode("after it")))
assert os.waitstatus_to_exitcode(os.wait()[1]) == 2
"""
    environment = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_bound_on_token_length_only_where_there_is_one(
    tokenizer: Tokenizer, tmp_path: Path, folder: Path
) -> None:
    bound = tokenizer.longest_token_bytes
    assert bound is not None and bound >= len(" " * 128)
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    content["normalizer"] = {"type": "NFC"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    assert Tokenizer.open(tmp_path).longest_token_bytes is None
