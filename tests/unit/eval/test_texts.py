"""Files of text and chats, and windows of their tokens."""

from __future__ import annotations

import json
import lzma

import pytest
from fake_engine import FakeText

from moechat.errors import InvalidUtf8, Usage
from moechat.eval.texts import (
    FileMissing,
    FileUnreadable,
    encode_conversations,
    encode_stream,
    leading_ids,
    read_source,
    windows,
)

CHATS = [[["Hi there", "Hello"]], [[None, "Once upon"], ["More", "The end"]]]


@pytest.fixture
def write(tmp_path):
    def write_(name, content):
        path = tmp_path / name
        path.write_bytes(lzma.compress(content) if name.endswith(".xz") else content)
        return path

    return write_


@pytest.mark.parametrize("name", ["a.txt", "a.txt.xz", "a.xz", "without"])
def test_text_is_read_plain_or_packed(write, name):
    source = read_source(write(name, "\ufeffone\r\ntwo é".encode()))
    assert source.text == "one\ntwo é" and not source.conversations


@pytest.mark.parametrize("name", ["chats.json", "chats.json.xz"])
def test_chats_are_rendered_by_the_template(write, name):
    source = read_source(write(name, json.dumps(CHATS).encode()))
    text = FakeText()
    rendered = [text.tokenizer.decode(ids) for ids in encode_conversations(source, text)]
    assert rendered == [
        "<bos> <user> Hi there <reply> Hello",
        "<bos> <reply> Once upon <user> More <reply> The end",
    ]
    ids, lead = encode_stream(source, text)
    assert text.tokenizer.decode(ids) == " ".join(rendered) and lead == []


def test_a_text_is_encoded_as_text_behind_the_first_token_of_talks(write):
    source = read_source(write("a.txt", b"one two"))
    assert encode_stream(source, FakeText()) == ([3, 4], [0])


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.txt", b"a\xffb", InvalidUtf8),
        ("a.txt", b" \n", Usage),
        ("a.json", b"{}", Usage),
        ("a.json", b"[]", Usage),
        ("a.json", b"[[]]", Usage),
        ("a.json", b'[["ab"]]', Usage),
        ("a.json", b'[[["a", 1]]]', Usage),
        ("a.json", b'[[["a", null]]]', Usage),
        ("a.json", b'[[[1, "a"]]]', Usage),
        ("a.json", b"not json", Usage),
        ("a.json", b"[" * 100_000, Usage),
    ],
)
def test_what_is_neither_is_an_error(write, name, content, kind):
    with pytest.raises(kind):
        read_source(write(name, content))


def test_damaged_and_missing_files_are_errors(write, tmp_path, monkeypatch):
    packed = write("b.txt.xz", b"text " * 1000)
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(Usage, match="unpacked"):
        read_source(packed)
    packed.write_bytes(b"no xz at all")
    with pytest.raises(Usage, match="unpacked"):
        read_source(packed)
    kinds = {tmp_path / "absent": FileMissing, tmp_path / "a\0b": FileMissing}
    for path, kind in (kinds | {tmp_path: FileUnreadable}).items():
        with pytest.raises(kind) as caught:
            read_source(path)
        assert caught.value.exit_code == 3
    monkeypatch.setattr("moechat.eval.texts.LIMIT_BYTES", 100)
    with pytest.raises(Usage, match="more than"):
        read_source(write("bomb.xz", bytes(10_000)))


def test_windows_predict_every_token_once_but_the_first():
    ids = list(range(100, 125))
    found = windows(ids, [], 10, full=False)
    assert [id_ for window in found for id_ in window[1:]] == ids[1:]
    assert [len(window) - 1 for window in found] == [10, 10, 4]
    with_lead = windows(ids, [7], 10, full=False)
    assert all(window[0] == 7 and len(window) <= 11 for window in with_lead)
    assert [id_ for window in with_lead for id_ in window[2:]] == ids[1:]


@pytest.mark.parametrize(("count", "full"), [(10, 0), (11, 1), (20, 1), (21, 2)])
def test_full_windows_alone(count, full):
    found = windows(list(range(count)), [], 10, full=True)
    assert [len(window) for window in found] == [11] * full


def test_only_a_token_that_begins_talks_and_not_turns_leads():
    assert leading_ids(FakeText(bos=True)) == [0]
    assert leading_ids(FakeText(bos=False)) == []
