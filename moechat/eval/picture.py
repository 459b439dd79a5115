"""Quality over bytes: perplexity and needles, a line a policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moechat.bench.drawing import Drawing, axis_step
from moechat.eval.report import label, needles_found

_WIDTH, _HEIGHT = 900, 440
_TOP, _CHART_HEIGHT, _LEFT, _CHART_WIDTH, _GAP = 122, 270, 64, 350, 70
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
    drawing.text(20, 51, f"{cpu}; bytes with scales, over 2 bytes an element", "soft")
    _legend(drawing, names, colours)
    scored = [row for row in rows if row["perplexity_change_percent"] is not None]
    asked = [row for row in rows if row["needles"]]
    if scored:
        chart = _Chart(drawing, _LEFT, scored, colours)
        changes = [row["perplexity_change_percent"] for row in scored]
        top = min(max(*changes, 1.0), _MOST_PERCENT)
        chart.draw(
            "change of perplexity, %, over bytes",
            min(*changes, 0.0),
            top,
            lambda row: row["perplexity_change_percent"],
        )
    if asked:
        chart = _Chart(drawing, _LEFT + _CHART_WIDTH + _GAP, asked, colours)
        chart.draw("needles found, %, over bytes", 0.0, 100.0, _found_percent)
    return drawing


def _found_percent(row: dict[str, Any]) -> float:
    found, tried = needles_found(row)
    return 100 * found / tried


def _legend(drawing: Drawing, names: list[str], colours: dict[str, str]) -> None:
    x = 20.0
    for name in names:
        drawing.rectangle(x, 66, 10, 10, colours[name])
        drawing.text(x + 15, 75, name)
        x += 34 + 7.5 * len(name)


class _Chart:
    """Points of rows over the bytes that they sent; a line joins those of one policy."""

    def __init__(self, drawing: Drawing, left: float, rows: Rows, colours: dict[str, str]) -> None:
        self._drawing, self._left, self._rows, self._colours = drawing, left, rows, colours
        self._most_bytes = 1.05 * max(1.0, *(row["sent_of_fp16"] for row in rows))

    def draw(
        self, title: str, low: float, high: float, value: Callable[[dict[str, Any]], float]
    ) -> None:
        """Axes from 0 bytes and from ``low`` to ``high``; what is above stands at the top."""
        bottom = _TOP + _CHART_HEIGHT
        span = 1.06 * (high - low)

        def at(x: float, y: float) -> tuple[float, float]:
            inside = min(max(y, low), high)
            across = self._left + _CHART_WIDTH * x / self._most_bytes
            return across, bottom - 6 - (_CHART_HEIGHT - 12) * (inside - low) / span

        self._drawing.text(self._left, _TOP - 12, title, "soft")
        step = axis_step(span)
        for i in range(int(low // step), int(high // step) + 1):
            if i * step >= low:
                x, y = at(0, i * step)
                self._drawing.line([(x, y), (x + _CHART_WIDTH, y)], "grid")
                self._drawing.text(x - 6, y + 4, f"{i * step:g}", "soft", "end")
        for i in range(int(self._most_bytes / 0.25) + 1):
            x, _ = at(i * 0.25, low)
            self._drawing.text(x, bottom + 18, f"{i * 0.25:g}", "soft", "middle")
        for name, colour in self._colours.items():
            own = [row for row in self._rows if row["policy"] == name]
            places = [at(row["sent_of_fp16"], value(row)) for row in own]
            if len(places) > 1:
                self._drawing.line(places, colour, 2)
            for row, (x, y) in zip(own, places):
                hint = f"{label(row)}: {row['sent_of_fp16']:.3f} of FP16, {value(row):.2f} %"
                self._drawing.rectangle(x - 4, y - 4, 8, 8, colour, hint)
                if value(row) > high:
                    self._drawing.text(x + 7, y + 4, f"{value(row):+.1f} %", "soft")
