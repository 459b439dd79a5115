from pathlib import Path

import pytest

from moechat.gguf_magic import is_gguf


@pytest.mark.parametrize("kind", [str, Path])
def test_a_name_or_the_first_bytes_tell(tmp_path, kind):
    for name, content, wanted in (
        ("m.gguf", b"", True),
        ("blob", b"GGUF", True),
        ("blob", b"GGU", False),
        ("blob", b"", False),
    ):
        (tmp_path / name).write_bytes(content)
        assert is_gguf(kind(tmp_path / name)) is wanted
    (tmp_path / ".gguf").write_bytes(b"")
    assert is_gguf(kind(tmp_path / ".gguf"))
    assert not is_gguf(kind(tmp_path / "none"))
    assert not is_gguf(kind(tmp_path))
