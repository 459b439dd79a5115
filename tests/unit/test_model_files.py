"""What a model's files say beside the weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf_vocabulary as v
import gguf_writer as w
import numpy as np
import pytest
from oracles import MINI

from moechat.engine.model_files import GGUFFiles
from moechat.errors import CheckpointDamaged

TOKENIZER = v.metadata(
    "gpt2", ["a", "b", "<|im_end|>"], [v.NORMAL, v.NORMAL, v.CONTROL], pre="qwen2", merges=["a b"]
)


def gguf(folder: Path, **metadata: Any) -> GGUFFiles:
    path = folder / "m.gguf"
    content = {"general.architecture": "qwen3", **metadata}
    path.write_bytes(w.gguf_bytes(content, {"t": np.zeros(4, np.float32)}))
    return GGUFFiles(path, [path])


def test_whose_template_is_used_is_told_only_when_it_is(tmp_path: Path) -> None:
    tokenizer = {**TOKENIZER, v.PREFIX + "tokens": ["a", "b", "ab"]}
    assert "Qwen's is used" in gguf(tmp_path, **tokenizer).notice()
    assert gguf(tmp_path, **tokenizer, **{"tokenizer.chat_template": "a"}).notice() == ""
    assert gguf(tmp_path).notice() == ""  # no tokenizer
    assert gguf(tmp_path, **TOKENIZER).notice() == ""  # a damaged one: its merges give no token


def test_a_template_of_another_type_is_not_none(tmp_path: Path) -> None:
    files = gguf(tmp_path, **{"tokenizer.chat_template": 5})
    for ask in files.has_chat_template, files.notice:
        with pytest.raises(CheckpointDamaged, match=r"m\.gguf .*chat_template is no string"):
            ask()


def test_a_folder_needs_nothing_of_gguf() -> None:
    code = (
        "import sys; from pathlib import Path; from moechat.engine.model_files import *; "
        "files = find_model_files(Path(sys.argv[1])); files.bind(); files.text(); files.notice(); "
        "print([name for name in sys.modules if 'moechat' in name and "
        "('gguf_' in name or '.quantize.' in name) and not name.endswith('gguf_find')])"
    )
    command = [sys.executable, "-c", code, str(MINI)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    assert run.stdout.strip() == "['moechat.gguf_magic']"
