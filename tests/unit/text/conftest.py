from __future__ import annotations

import json
import lzma
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moechat
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
