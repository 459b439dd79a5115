"""Reports for people: facts and tables, coloured on terminals, aligned text everywhere else."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from moechat.terminal_size import fold_words, terminal_size

_BAR_CELLS = 10
_LEGEND_COLUMNS = 80


@dataclass(frozen=True, slots=True)
class Bar:
    """A cell: a fraction as a bar, then as a number with its range."""

    fraction: float
    least: float | None = None
    greatest: float | None = None

    def text(self, full: str, empty: str) -> str:
        """With ``full`` and ``empty`` for the tenths of the bar; no bar when both are ""."""
        filled = max(0, min(round(self.fraction * _BAR_CELLS), _BAR_CELLS))
        text = f"{full * filled}{empty * (_BAR_CELLS - filled)} {self.fraction:.2f}".lstrip()
        return text if self.least is None else f"{text} ({self.least:.2f}-{self.greatest:.2f})"

    @property
    def colour(self) -> str:
        """The nearer to one, the greener."""
        return "green" if self.fraction >= 0.75 else "yellow" if self.fraction >= 0.5 else "red"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows below ``head``, and below them the ``legend``: what the columns mean.

    Columns in ``left``, and bars, are aligned to the left.
    """

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str | Bar, ...]]
    left: frozenset[str] = frozenset()
    legend: str = ""

    def is_left(self, column: int) -> bool:
        """Whether a column is aligned to the left."""
        bars = bool(self.rows) and isinstance(self.rows[0][column], Bar)
        return bars or self.head[column] in self.left


Text = list["str | Table"]  # a line each, or a table


def print_text(text: Text, stdout: TextIO) -> None:
    """Write it; with colour where ``stdout`` is a terminal that wants it."""
    console = _rich_console(stdout)
    bar = _bar_cells(stdout)
    columns = terminal_size(stdout)[0] if stdout.isatty() else None
    for item in text:
        if isinstance(item, str):
            stdout.write(fold_words(item, stdout) + "\n")
            continue
        cells = _cells(item, bar)
        if columns is not None and _width(item, cells) > columns:
            cells = _cells(item, ("", ""))
        if item.title:
            stdout.write(f"\n{fold_words(item.title, stdout)}\n")
        if console is None:
            _print_aligned(item, cells, stdout)
        else:
            # Wider than the terminal: it wraps lines, where rich would cut figures.
            console.width = max(columns or 0, _width(item, cells))
            _print_coloured(item, cells, console)
        if item.legend:
            width = min((columns or _LEGEND_COLUMNS) - 1, _LEGEND_COLUMNS)
            folded = textwrap.fill(item.legend, max(width, 20), break_long_words=False)
            stdout.write(folded + "\n")
    stdout.flush()


def _cells(table: Table, bar: tuple[str, str]) -> list[list[str]]:
    return [
        [cell.text(*bar) if isinstance(cell, Bar) else cell for cell in row] for row in table.rows
    ]


def _widths(table: Table, cells: list[list[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(table.head, *cells, strict=True)]


def _width(table: Table, cells: list[list[str]]) -> int:
    widths = _widths(table, cells)
    return sum(widths) + 2 * (len(widths) - 1)


def _print_aligned(table: Table, cells: list[list[str]], stdout: TextIO) -> None:
    lines = [list(table.head), *cells]
    widths = _widths(table, cells)
    for line in lines:
        padded = (
            cell.ljust(width) if table.is_left(column) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        stdout.write("  ".join(padded).rstrip() + "\n")


def _print_coloured(table: Table, cells: list[list[str]], console: Any) -> None:
    from rich.table import Table as RichTable
    from rich.text import Text as RichText

    drawn = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column, name in enumerate(table.head):
        justify: Any = "left" if table.is_left(column) else "right"
        drawn.add_column(name, justify=justify, no_wrap=True)
    for row, texts in zip(table.rows, cells, strict=True):
        styled = [RichText(text) for text in texts]
        for cell, text in zip(row, styled, strict=True):
            if isinstance(cell, Bar):
                text.stylize(cell.colour, 0, _BAR_CELLS)
        drawn.add_row(*styled)
    console.print(drawn)


def _rich_console(stdout: TextIO) -> Any:
    """None where colour is not wanted, or rich is not installed."""
    dumb = os.environ.get("TERM", "") in ("", "dumb", "unknown")
    if not stdout.isatty() or os.environ.get("NO_COLOR") or dumb:
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stdout, highlight=False)


def _bar_cells(stdout: TextIO) -> tuple[str, str]:
    try:
        "█░".encode(stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "#", "."
    return "█", "░"
