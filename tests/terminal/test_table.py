"""Tables of the program's own."""

from __future__ import annotations

import io
import sys

import pytest

from moechat.terminal.table import columns_of, table_lines

ROWS = [("NAME", "SIZE", "LICENCE"), ("first", "34.9 MB", "a licence"), ("x", "-", "MIT")]


def test_what_fits_is_aligned():
    assert table_lines(ROWS, 25) == [
        "NAME   SIZE     LICENCE",
        "first  34.9 MB  a licence",
        "x      -        MIT",
    ]


def test_the_last_column_is_wrapped():
    assert table_lines(ROWS[1:], 23, indent=0)[:2] == ["first  34.9 MB  a", " " * 16 + "licence"]


def test_columns_without_room_go_below():
    assert table_lines(ROWS, 20) == [
        "NAME   SIZE",
        "    LICENCE",
        "first  34.9 MB",
        "    a licence",
        "x      -",
        "    MIT",
    ]
    assert table_lines(ROWS[1:], 13, indent=2)[:4] == [
        "  first",
        "      34.9 MB",
        "      a",
        "      licence",
    ]


def test_a_long_word_moves_no_column():
    path = "/" + "x" * 60
    assert table_lines([("folder", path), ("name", "mini")], 40) == [
        f"folder  {path}",
        "name    mini",
    ]


@pytest.mark.parametrize("columns", range(13, 60))
def test_no_line_is_too_long_and_no_word_is_cut(columns):
    rows = [("a", "bb", "some words of a text that is long"), ("ccccc", "", "short"), ("", "d", "")]
    lines = table_lines(rows, columns)
    assert all(len(line) <= columns and line == line.rstrip() for line in lines)
    assert " ".join(lines).split() == " ".join(" ".join(row) for row in rows).split()


def test_a_file_has_no_columns():
    assert columns_of(io.StringIO()) == sys.maxsize
