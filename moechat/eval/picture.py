"""Quality over bytes: perplexity and needles, a line a policy."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moechat.bench.drawing import Drawing, axis_step
from moechat.eval.report import label, needles_found
from moechat.terminal.neutralise import one_line

_WIDTH, _HEIGHT = 900, 480
_TOP, _CHART_HEIGHT, _LEFT, _CHART_WIDTH, _GAP = 146, 270, 64, 350, 70
_SIDES = (10.0, 6.0, 3.0)  # of points: one on another is smaller, so that both are seen
_NAME_CHARACTERS = 40
_X_AXIS = "bytes sent, scales included, over 2 bytes an element"
_MOST_PERCENT = 10.0  # changes of perplexity above are drawn at the top, with their figure
_SERIES = 9  # colours that a drawing has for lines

Rows = list[dict[str, Any]]


def quality_over_bytes(report: dict[str, Any]) -> Drawing:
    """Of a report of ``eval kv``."""
    rows: Rows = report["rows"]
    names = list(dict.fromkeys(row["policy"] for row in rows))
    colours = {name: f"series{number % _SERIES}" for number, name in enumerate(names)}
    drawing = Drawing(_WIDTH, _HEIGHT, f"{report['model']}: quality over bytes of the KV path")
    drawing.text(20, 30, drawing.title, size=16)
    cpu = report["machine"]["cpu"] or "unknown processor"
    drawing.text(20, 51, cpu, "soft")
    drawing.text(20, 68, _measured(report), "soft")
    _legend(drawing, names, colours)
    scored = [row for row in rows if row["perplexity_change_percent"] is not None]
    asked = [row for row in rows if row["needles"]]
    if scored:
        chart = _Chart(drawing, _LEFT, scored, colours)
        changes = [row["perplexity_change_percent"] for row in scored]
        top = min(max(*changes, 1.0), _MOST_PERCENT)
        chart.draw(
            "change of perplexity, %, with one standard error",
            min(*changes, 0.0),
            top,
            lambda row: row["perplexity_change_percent"],
            _standard_error,
        )
    if asked:
        chart = _Chart(drawing, _LEFT + _CHART_WIDTH + _GAP, asked, colours)
        chart.draw("needles found, %", 0.0, 100.0, _found_percent)
    return drawing


def _measured(report: dict[str, Any]) -> str:
    """What the figures are of, and whether all of it was measured."""
    rows: Rows = report["rows"]
    facts = ["interrupted: the figures so far"] if report["interrupted"] else []
    windows = max(row["windows"] for row in rows)
    if windows:
        name = one_line(Path(report["text"]).name)[:_NAME_CHARACTERS]
        scored = f"{report['scored_tokens']:,} of {report['window_tokens']:,} tokens predicted"
        facts.append(f"{name}: {windows} window{'s' * (windows != 1)}, {scored}")
    tried = max(needles_found(row)[1] for row in rows)
    if tried:
        lengths = sorted({each["length_tokens"] for row in rows for each in row["needles"]})
        of = f"{lengths[0]:,}" + (f" to {lengths[-1]:,}" if len(lengths) > 1 else "")
        facts.append(f"{tried} needle{'s' * (tried != 1)} in texts of {of} tokens")
    return "; ".join(facts)


def _standard_error(row: dict[str, Any]) -> float:
    error = row["perplexity_change_standard_error_percent"]
    return 0.0 if error is None or row["policy"] == "native" else float(error)


def _found_percent(row: dict[str, Any]) -> float:
    found, tried = needles_found(row)
    return 100 * found / tried


def _legend(drawing: Drawing, names: list[str], colours: dict[str, str]) -> None:
    x, y = 20.0, 79.0
    for name in names:
        width = 34 + 7.5 * len(name)
        if x + width > _WIDTH:
            x, y = 20.0, y + 15
        drawing.rectangle(x, y, 10, 10, colours[name])
        drawing.text(x + 15, y + 9, name)
        x += width


class _Chart:
    """Points of rows over the bytes that they sent; a line joins those of one policy."""

    def __init__(self, drawing: Drawing, left: float, rows: Rows, colours: dict[str, str]) -> None:
        self._drawing, self._left, self._rows, self._colours = drawing, left, rows, colours
        self._most_bytes = 1.05 * max(1.0, *(row["sent_of_fp16"] for row in rows))

    def draw(
        self,
        title: str,
        low: float,
        high: float,
        value: Callable[[dict[str, Any]], float],
        error: Callable[[dict[str, Any]], float] = lambda row: 0.0,
    ) -> None:
        """Axes from 0 bytes and from a line at or below ``low`` to ``high``.

        What is above ``high`` stands at the top; bars of errors end there, too.
        """
        bottom = _TOP + _CHART_HEIGHT
        shown = [row for row in self._rows if value(row) <= high]
        low = min([low, *(value(row) - error(row) for row in shown)])
        high = max([high, *(value(row) + error(row) for row in shown)])
        step = axis_step(1.06 * (high - low))
        low = step * math.floor(low / step)
        span = 1.06 * (high - low)

        def at(x: float, y: float) -> tuple[float, float]:
            inside = min(max(y, low), high)
            across = self._left + _CHART_WIDTH * x / self._most_bytes
            return across, bottom - 6 - (_CHART_HEIGHT - 12) * (inside - low) / span

        self._drawing.text(self._left, _TOP - 12, title, "soft")
        for i in range(round(low / step), math.floor(high / step) + 1):
            x, y = at(0, i * step)
            self._drawing.line([(x, y), (x + _CHART_WIDTH, y)], "grid")
            self._drawing.text(x - 6, y + 4, f"{i * step:g}", "soft", "end")
        for i in range(int(self._most_bytes / 0.25) + 1):
            x, _ = at(i * 0.25, low)
            self._drawing.text(x, bottom + 18, f"{i * 0.25:g}", "soft", "middle")
        label_x = self._left + _CHART_WIDTH / 2
        self._drawing.text(label_x, bottom + 38, _X_AXIS, "soft", "middle")
        placed: list[tuple[float, float]] = []
        for name, colour in self._colours.items():
            own = [row for row in self._rows if row["policy"] == name]
            places = [at(row["sent_of_fp16"], value(row)) for row in own]
            if len(places) > 1:
                self._drawing.line(places, colour, 2)
            for row, (x, y) in zip(own, places):
                self._error_bar(at, row["sent_of_fp16"], value(row), error(row), colour)
                below = sum(abs(x - a) < _SIDES[0] and abs(y - b) < _SIDES[0] for a, b in placed)
                side = _SIDES[min(below, len(_SIDES) - 1)]
                hint = f"{label(row)}: {row['sent_of_fp16']:.3f} of FP16, {value(row):.2f} %"
                hint += f" ± {error(row):.2f}" if error(row) else ""
                self._drawing.rectangle(x - side / 2, y - side / 2, side, side, colour, hint)
                placed.append((x, y))
                if value(row) > high:
                    self._drawing.text(x + 7, y + 4, f"{value(row):+.1f} %", "soft")

    def _error_bar(
        self,
        at: Callable[[float, float], tuple[float, float]],
        across: float,
        value: float,
        error: float,
        colour: str,
    ) -> None:
        if not error:
            return
        ends = [at(across, value - error), at(across, value + error)]
        self._drawing.line(ends, colour)
        for x, y in ends:
            self._drawing.line([(x - 3, y), (x + 3, y)], colour)


def write_picture(drawing: Drawing, path: Path) -> None:
    """Whole or not at all: nobody sees half a picture. OSError when it cannot be written."""
    path = path.resolve()
    temporary = path.with_name(f".moechat-{os.getpid()}{path.suffix}")
    try:
        drawing.write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
