"""The report of ``bench kernels`` for people: one line a row."""

from __future__ import annotations

import math
import os
from typing import Any, TextIO

_BAR_CELLS = 10
_HEADINGS = ("FORMAT", "THREADS", "BATCH", "MS", "GB/S", "READING", "OF READING", "REGIME")


def print_table(report: dict[str, Any], stdout: TextIO) -> None:
    """Write the table; with colour where ``stdout`` is a terminal that wants it."""
    full, empty = _bar_cells(stdout)
    rows = [_cells(row, full, empty) for row in report["rows"]]
    lines = [f"{line}\n" for line in _facts(report)]
    stdout.write("".join(lines[:1]))
    if not _print_with_rich(report, rows, stdout):
        widths = [max(map(len, column)) for column in zip(_HEADINGS, *rows, strict=True)]
        for cells in (_HEADINGS, *rows):
            padded = (
                cell.ljust(width) if i in (0, 6, 7) else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
            )
            stdout.write("  ".join(padded).rstrip() + "\n")
    stdout.write("".join(lines[1:]))
    stdout.flush()


def _cells(row: dict[str, Any], full: str, empty: str) -> tuple[str, ...]:
    fraction = row["fraction_of_read"]
    filled = min(round(fraction * _BAR_CELLS), _BAR_CELLS)
    span = f"{row['fraction_of_read_min']:.2f}-{row['fraction_of_read_max']:.2f}"
    return (
        row["format"],
        str(row["threads"]),
        str(row["batch"]),
        f"{row['ms_median']:.4g}",
        f"{row['weight_gb_per_s']:.1f}",
        f"{row['read_gb_per_s']:.1f}",
        f"{full * filled}{empty * (_BAR_CELLS - filled)} {fraction:.2f} ({span})",
        row["regime"],
    )


def _print_with_rich(report: dict[str, Any], rows: list[tuple[str, ...]], stdout: TextIO) -> bool:
    """False where colour is not wanted, or rich is not installed."""
    dumb = os.environ.get("TERM", "") in ("", "dumb", "unknown")
    if not stdout.isatty() or os.environ.get("NO_COLOR") or dumb:
        return False
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, heading in enumerate(_HEADINGS):
        table.add_column(heading, justify="left" if i in (0, 6, 7) else "right", no_wrap=True)
    for row, cells in zip(report["rows"], rows, strict=True):
        styled = [Text(cell) for cell in cells]
        styled[6].stylize(_colour(row["fraction_of_read"]), 0, _BAR_CELLS)
        table.add_row(*styled)
    Console(file=stdout, highlight=False).print(table)
    return True


def _colour(fraction: float) -> str:
    return "green" if fraction >= 0.75 else "yellow" if fraction >= 0.5 else "red"


def _facts(report: dict[str, Any]) -> list[str]:
    """A line above the table, then those below it."""
    shape, machine = report["shape"], report["machine"]
    kernels = sorted({row["isa"] for row in report["rows"]})
    error = max(facts["max_relative_error"] for facts in report["weights"])
    lines = [
        f"moe_ffn of {shape['name']}: top {shape['experts_per_token']} experts of "
        f"{shape['inner']} x {shape['hidden']}, {'+'.join(kernels)}, on {machine['cpu']}",
        f"medians of {report['settings']['bursts']} bursts; reading: plain reading with as many "
        "threads, between the bursts",
        f"largest relative difference from the reference kernels: {error:.1e}",
    ]
    lines += [_phases(row) for row in report["rows"]]
    cached = [
        facts["format"]
        for facts in report["weights"]
        if (facts["file_over_last_level_cache"] or math.inf) < 1
    ]
    if cached:
        lines.append(f"the caches could hold all of it, no measure of memory: {', '.join(cached)}")
    paged = [facts["format"] for facts in report["weights"] if facts["major_page_faults"]]
    if paged:
        lines.append(
            f"memory was short and weights came from disk: no measure of memory: {', '.join(paged)}"
        )
    if machine["load_average_1_minute"] > machine["usable_cpus"]:
        lines.append(
            f"other programs were busy (load {machine['load_average_1_minute']:.1f} on "
            f"{machine['usable_cpus']} processors): read the ratios only"
        )
    return lines


def _phases(row: dict[str, Any]) -> str:
    times = ", ".join(
        f"{phase['phase']} {phase['ms_per_call']:.3g} ms (imbalance {phase['imbalance']:.2f})"
        for phase in row["phases"]
    )
    threads = f"{row['threads']} thread{'s' * (row['threads'] != 1)}"
    return f"{row['format']}, {threads}, batch {row['batch']}: {times}"


def _bar_cells(stdout: TextIO) -> tuple[str, str]:
    try:
        "█░".encode(stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "#", "."
    return "█", "░"
