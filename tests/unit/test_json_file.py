import pytest

from moechat.errors import CheckpointDamaged
from moechat.json_file import foreign_content, parse_json_object, read_json_object


def test_an_object_is_read(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"a": {"b": [1, "é"]}}', encoding="utf-8")
    assert read_json_object(path, 100) == {"a": {"b": [1, "é"]}}


def test_the_size_limit_counts_bytes(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"a": 1}')
    assert read_json_object(path, 8) == {"a": 1}
    with pytest.raises(CheckpointDamaged, match="larger than 7 bytes"):
        read_json_object(path, 7)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"null", "not a JSON object"),
        (b"\xc3", "not UTF-8"),
        (b'{"a":' * 100_000, "too deep"),
        (b'{"a": {"b": 1, "b": 1}}', "'b' twice"),
    ],
)
def test_anything_else_is_a_value_error(text, says):
    with pytest.raises(ValueError, match=says):
        parse_json_object(text)


def test_finding_a_repeated_key_is_not_quadratic():
    keys = ", ".join(f'"{number}": 0' for number in range(60_000))
    with pytest.raises(ValueError, match="'7' twice"):
        parse_json_object(f'{{{keys}, "7": 1}}'.encode())


def test_a_web_page_and_a_git_lfs_pointer_are_recognised():
    assert "HTML" in foreign_content(b"  \n<!DocType HTML>")
    assert "git-lfs" in foreign_content(b"version https://git-lfs.github.com/spec/v1\noid")
    assert foreign_content(b"{}") == ""


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointDamaged, match=r"absent\.json cannot be used: it is missing"):
        read_json_object(tmp_path / "absent.json", 10)
