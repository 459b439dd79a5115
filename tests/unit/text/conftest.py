from __future__ import annotations

import json
import lzma
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from text_fixtures import CHAT, unpack

import moechat
from moechat.engine.text import TextModel
from moechat.text import harmony, template_environment
from moechat.text.chat_template import ChatTemplate
from moechat.text.tokenizer import Tokenizer

FIXTURE = Path(__file__).parents[2] / "fixtures" / "deepseek_v3"
MINI = Path(moechat.__file__).parent / "data" / "mini"


@pytest.fixture(scope="session")
def cases() -> dict[str, Any]:
    return json.loads((FIXTURE / "chat.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with DeepSeek-V3's tokenizer and template."""
    folder = tmp_path_factory.mktemp("deepseek_v3")
    with lzma.open(FIXTURE / "tokenizer.json.xz") as packed:
        (folder / "tokenizer.json").write_bytes(packed.read())
    shutil.copy(FIXTURE / "tokenizer_config.json", folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.open(folder)


@pytest.fixture(scope="session")
def template(folder: Path, tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate.open(folder, tokenizer)


@pytest.fixture(scope="session")
def mini_tokenizer() -> Tokenizer:
    return Tokenizer.open(MINI)


@pytest.fixture(scope="session")
def mini_template(mini_tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate.open(MINI, mini_tokenizer)


@pytest.fixture
def make_template(tmp_path: Path, tokenizer: Tokenizer) -> Callable[[str], ChatTemplate]:
    """Opens a template text with DeepSeek-V3's tokenizer."""

    def make(source: str) -> ChatTemplate:
        (tmp_path / "chat_template.jinja").write_text(source, encoding="utf-8")
        return ChatTemplate.open(tmp_path, tokenizer)

    return make


@pytest.fixture
def recorded_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time at which the fixtures' prompts were rendered."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Clock:
            return cls(2025, 6, 28, 12, 0, 0)

    monkeypatch.setattr(template_environment, "datetime", Clock)


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.open(unpack("qwen3", tmp_path_factory.mktemp("qwen3")))


@pytest.fixture(scope="session")
def mistral_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.open(unpack("mistral_v3", tmp_path_factory.mktemp("mistral_v3")))


@pytest.fixture(scope="session")
def gptoss(folder: Path) -> TextModel:
    """gpt-oss' template and control tokens over DeepSeek-V3's vocabulary."""
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.add_special_tokens([*harmony.MARKERS, *harmony.END_TOKENS])
    source = (CHAT / "gptoss" / "chat_template.jinja").read_text(encoding="utf-8")
    config = {"eos_token": "<|return|>", "bos_token": "<|startoftext|>"}
    return TextModel.from_parts(library, config, source, origin="gpt-oss")
