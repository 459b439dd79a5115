"""Reading prompts: limits, files that are none, and what is said of them."""

import io
import os
import tracemalloc
from pathlib import Path

import pytest

from moechat.cli import prompt_text
from moechat.cli.prompt_text import FileMissing, compose_prompt, read_piped, read_text_file
from moechat.errors import PromptEmpty, PromptTooLong, Usage


def test_endless_stdin_is_refused_with_bounded_memory(monkeypatch):
    monkeypatch.setattr(prompt_text, "TEXT_LIMIT_BYTES", 5_000_000)
    with open("/dev/zero", "rb") as endless:
        tracemalloc.start()
        with pytest.raises(PromptTooLong) as caught:
            read_piped(endless)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert caught.value.exit_code == 4 and "5,000,000" in caught.value.message
    assert peak_bytes < 12_000_000


def test_closed_or_unreadable_stdin():
    assert read_piped(None) == ""
    with pytest.raises(Usage, match="standard input cannot be read"):
        read_piped(io.FileIO(os.open(os.devnull, os.O_WRONLY)))


def test_slow_stdin_is_remarked_on_once(monkeypatch):
    monkeypatch.setattr(prompt_text, "_PATIENCE_SECONDS", 0.01)
    said = []
    reader, writer = os.pipe()

    def say():
        said.append(True)
        os.write(writer, b"late")
        os.close(writer)

    with open(reader, "rb") as stream:
        assert read_piped(stream, say) == "late"
    with open(os.devnull, "rb") as stream:
        assert read_piped(stream, say) == ""
    assert said == [True]


@pytest.mark.parametrize("path", ["no-such-file", ".", "a\0b", "/dev/null/x"])
def test_file_that_cannot_be_read_is_named_with_its_flag(path):
    with pytest.raises(FileMissing, match="--system-file") as caught:
        read_text_file(Path(path), "--system-file")
    assert caught.value.exit_code == 3


def test_only_one_trailing_newline_goes():
    assert compose_prompt("a\n\n", "q") == "a\n\n\nq"
    assert compose_prompt("a\n", None) == "a"
    with pytest.raises(PromptEmpty):
        compose_prompt("\n", None)
