from __future__ import annotations

import json
import lzma
import shutil
from pathlib import Path
from typing import Any

import pytest

import moechat
from moechat.text.chat_template import ChatTemplate
from moechat.text.tokenizer import Tokenizer

FIXTURES = Path(__file__).parents[2] / "fixtures" / "deepseek_v3"
MINI = Path(moechat.__file__).parent / "data" / "mini"


@pytest.fixture(scope="session")
def deepseek_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepseek_v3")
    packed = (FIXTURES / "tokenizer.json.xz").read_bytes()
    (folder / "tokenizer.json").write_bytes(lzma.decompress(packed))
    shutil.copy(FIXTURES / "tokenizer_config.json", folder)
    return folder


@pytest.fixture(scope="session")
def deepseek(deepseek_folder: Path) -> Tokenizer:
    return Tokenizer.open(deepseek_folder)


@pytest.fixture(scope="session")
def template(deepseek_folder: Path, deepseek: Tokenizer) -> ChatTemplate:
    return ChatTemplate.open(deepseek_folder, deepseek)


@pytest.fixture(scope="session")
def expected() -> dict[str, Any]:
    cases: dict[str, Any] = json.loads((FIXTURES / "chat.json").read_text())
    return cases


@pytest.fixture(scope="session")
def mini() -> Tokenizer:
    return Tokenizer.open(MINI)
