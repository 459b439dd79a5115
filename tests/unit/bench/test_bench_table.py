"""The table for people: plain where it is piped, coloured on a terminal, with its warnings."""

from __future__ import annotations

import io
import re

import pytest

from moechat.bench.kernels.report import kernel_text
from moechat.bench.table import Bar, Table, print_text


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


class Pipe(io.StringIO):
    encoding = "ascii"


def row(fraction):
    return {
        "format": "fp8",
        "isa": "avx2",
        "threads": 2,
        "batch": 1,
        "ms_median": 7.123,
        "weight_gb_per_s": 49.47,
        "read_gb_per_s": 70.0,
        "read_gb_per_s_min": 66.0,
        "read_gb_per_s_max": 72.0,
        "fraction_of_read": fraction,
        "fraction_of_read_min": fraction - 0.1,
        "fraction_of_read_max": fraction + 0.1,
        "regime": "fast",
        "phases": [{"phase": "experts.gate_up", "share_of_time": 0.62, "imbalance": 1.03}],
    }


@pytest.fixture
def report():
    return {
        "shape": {"name": "mini", "hidden": 384, "inner": 128, "experts_per_token": 4},
        "machine": {"cpu": "CPU", "load_average_1_minute": 0.5, "usable_cpus": 2},
        "settings": {"bursts": 7, "fast_regime_min_read_gb_per_s": 65.0},
        "weights": [
            {
                "format": "fp8",
                "max_relative_error": 3.2e-7,
                "file_over_last_level_cache": 5.6,
                "major_page_faults": 0,
            }
        ],
        "rows": [row(0.71), row(1.02)],
    }


def printed(report, stream):
    print_text(kernel_text(report), stream)
    return stream.getvalue()


@pytest.fixture(autouse=True)
def colours(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_a_pipe_gets_aligned_text_without_escapes(report):
    text = printed(report, Pipe())
    assert "\x1b" not in text and text.isascii()
    heading, first, second = text.splitlines()[1:4]
    assert first.split() == (
        ["fp8", "2", "1", "7.123", "49.5", "70.0", "#######...", "0.71", "(0.61-0.81)", "fast"]
    )
    assert "########## 1.02" in second
    assert first.index("#") == second.index("#") == heading.index("OF READING")
    assert "gate_up 62 % (imbalance 1.03)" in text and "0.00000032" in text


def test_a_terminal_gets_colour_unless_it_declines(report, monkeypatch):
    text = printed(report, Terminal())
    assert "\x1b[" in text
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "███████░░░ 0.71 (0.61-0.81)" in plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in printed(report, Terminal())


@pytest.mark.parametrize(
    ("part", "key", "value", "words"),
    [
        ("machine", "load_average_1_minute", 2.5, "busy before (load 2.5 on 2)"),
        ("weights", "file_over_last_level_cache", 0.5, "caches could hold"),
        ("weights", "major_page_faults", 3, "came from disk"),
        ("rows", "read_gb_per_s_min", 40.0, "plain reading with 2 threads went from 40 to 72"),
        ("rows", "threads", 4096, "4096 threads share"),
    ],
)
def test_what_spoils_figures_is_told(report, part, key, value, words):
    assert words not in printed(report, Pipe())
    (report[part] if part == "machine" else report[part][0])[key] = value
    assert words in printed(report, Pipe())


@pytest.mark.parametrize("colour", ["", "1"])
def test_a_narrow_terminal_loses_the_bars_and_no_figure(report, monkeypatch, colour):
    monkeypatch.setenv("NO_COLOR", colour)
    for columns in (60, 20):
        monkeypatch.setenv("COLUMNS", str(columns))
        plain = re.sub(r"\x1b\[[0-9;]*m", "", printed(report, Terminal()))
        assert "█" not in plain and "░" not in plain and "…" not in plain
        assert re.search(r"fp8 +2 +1 +7.123 +49.5 +70.0 +0.71 \(0.61-0.81\) +fast", plain)


def test_columns_are_aligned_and_titles_stand_above():
    table = Table("a title", ("NAME", "N"), [("x", "1"), ("long", "12345")], frozenset({"NAME"}))
    stream = Pipe()
    print_text(["first", table, "last"], stream)
    assert stream.getvalue().splitlines() == (
        ["first", "", "a title", "NAME      N", "x         1", "long  12345", "last"]
    )


@pytest.mark.parametrize(
    ("fraction", "cells"), [(-0.2, 0), (0.0, 0), (0.349, 3), (0.96, 10), (7.5, 10)]
)
def test_a_bar_has_ten_cells_whatever_it_shows(fraction, cells):
    assert Bar(fraction).text("#", ".").split()[0] == "#" * cells + "." * (10 - cells)


def test_lines_break_between_words_on_a_terminal_and_stay_whole_elsewhere(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    line = "warning: plain reading went from 2.33 to 6.46 GB/s meanwhile"
    table = Table("", ("N",), [("1",)], legend="N: a number that is explained in many words here")
    terminal, pipe = Terminal(), Pipe()
    print_text([line, table], terminal)
    print_text([line, table], pipe)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()).splitlines()
    assert max(map(len, lines)) < 40 and line in " ".join(lines) and table.legend in " ".join(lines)
    assert line in pipe.getvalue().splitlines() and pipe.getvalue().endswith(f"{table.legend}\n")
