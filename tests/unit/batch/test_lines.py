"""Batch lines: what is a prompt, what is refused, and that every result is valid JSON."""

import io
import json

import pytest

from moechat.batch.lines import BadLine, encode_result, parse_line, read_lines
from moechat.errors import InvalidUtf8, MoechatError, PromptEmpty
from moechat.messages import Turn


def user(text: str) -> list[Turn]:
    return [Turn("user", text)]


@pytest.mark.parametrize(
    ("line", "prompt"),
    [
        (b"What day comes after Friday?", "What day comes after Friday?"),
        (b'{"prompt": "What is 7 plus 8?"}', "What is 7 plus 8?"),
        (b'  {"prompt": "a", "id": 7, "custom_id": "x", "metadata": {}}', "a"),
        (b'"two\\nlines"', "two\nlines"),
        (b' \t"quoted"  ', "quoted"),
        (b'{"prompt": "\\ud83e\\udd8a"}', "\U0001f98a"),
        (b"say \\n as it stands", "say \\n as it stands"),
        (b"[1, 2] is a list", "[1, 2] is a list"),
        (b"  indented", "  indented"),
        ("größer".encode(), "größer"),
    ],
)
def test_line_is_prompt(line, prompt):
    assert parse_line(line) == user(prompt)


@pytest.mark.parametrize("line", [b"", b"   ", b"\t\t", "\u00a0\u3000".encode()])
def test_blank_line_is_skipped(line):
    assert parse_line(line) is None


def test_messages_become_turns():
    line = json.dumps(
        {
            "messages": [
                {"role": "system", "content": "Be short."},
                {"role": "user", "content": "My name is Lily."},
                {"role": "assistant", "content": "Hello."},
                {"role": "user", "content": "Who am I?"},
            ]
        }
    ).encode()
    assert parse_line(line, "Be long.") == [
        Turn("system", "Be short."),
        Turn("user", "My name is Lily."),
        Turn("assistant", "Hello."),
        Turn("user", "Who am I?"),
    ]


def test_system_comes_from_the_line_or_else_from_the_flag():
    assert parse_line(b"hi", "Flag.") == [Turn("system", "Flag."), *user("hi")]
    own = parse_line(b'{"system": "Own.", "prompt": "hi"}', "Flag.")
    assert own == [Turn("system", "Own."), *user("hi")]


@pytest.mark.parametrize(
    "line",
    [
        b"{broken",
        b"{}",
        b'"open',
        b'"a" b',
        b'{"prompt": 1}',
        b'{"prompt": null}',
        b'{"prompt": "a", "messages": []}',
        b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": "a", "temperature": 0}',
        b'{"prompt": "a", "system": 1}',
        b'{"messages": []}',
        b'{"messages": {}}',
        b'{"messages": ["a"]}',
        b'{"messages": [{"role": "user"}]}',
        b'{"messages": [{"role": ["user"], "content": "a"}]}',
        b'{"messages": [{"role": "tool", "content": "a"}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}',
        b'{"messages": [{"role": "assistant", "content": "a"}]}',
        b'{"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}',
        b'{"system": "s", "messages": [{"role": "system", "content": "t"},'
        b' {"role": "user", "content": "a"}]}',
        b'{"system": "", "messages": [{"role": "system", "content": "t"},'
        b' {"role": "user", "content": "a"}]}',
        b'{"prompt": ' + b"[" * 100_000,
        b'"' + b"[" * 10,
        b'{"prompt": "a", "id": ' + b"9" * 5_000 + b"}",
        b'{"prompt": "a\x00"}',
        None,
    ],
)
def test_bad_line_is_refused(line):
    with pytest.raises(BadLine):
        parse_line(line)


@pytest.mark.parametrize("line", [b"abc\xff", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}'])
def test_text_that_is_not_unicode_is_refused(line):
    with pytest.raises(InvalidUtf8):
        parse_line(line)


def test_invalid_utf8_names_the_byte():
    with pytest.raises(InvalidUtf8, match="byte 3 "):
        parse_line(b"abc\xff")


@pytest.mark.parametrize("line", [b'""', b'{"prompt": " "}', b'"\\n"'])
def test_empty_prompt_is_refused(line):
    with pytest.raises(PromptEmpty):
        parse_line(line)


def test_refusals_are_one_line_and_have_a_name():
    for line in (b"{\x1b[31mbroken", b'{"\\u001b[31m\\n": 1}', b"{" * 3000):
        with pytest.raises(MoechatError) as caught:
            parse_line(line)
        assert "\n" not in caught.value.message
        assert len(caught.value.message) < 400


def test_lines_lose_their_ends_and_the_byte_order_mark():
    stream = io.BytesIO(b"\xef\xbb\xbfa\r\nb\n\n\xef\xbb\xbfc")
    assert list(read_lines(stream)) == [b"a", b"b", b"", b"\xef\xbb\xbfc"]


def test_too_long_line_is_skipped_alone():
    stream = io.BytesIO(b"x" * 11 + b"\nok\n" + b"y" * 3_000_000 + b"\n" + b"z" * 10 + b"\nw")
    assert list(read_lines(stream, 10)) == [None, b"ok", None, b"z" * 10, b"w"]


def test_too_long_last_line_ends_the_stream():
    assert list(read_lines(io.BytesIO(b"x" * 50), 10)) == [None]


def test_results_are_one_valid_line_that_no_terminal_obeys():
    text = "\x1b[31m \x9b \x7f \n \r \u2028 \u2029 \ud800 ä \U0001f98a \x00"
    encoded = encode_result({"index": 0, "text": text})
    assert encoded.count(b"\n") == 1 and encoded.endswith(b"\n")
    assert json.loads(encoded)["text"] == text.replace("\ud800", "\ufffd")
    assert "ä \U0001f98a".encode() in encoded
    decoded = encoded.decode().rstrip("\n")
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 or c in "\u2028\u2029" for c in decoded)
