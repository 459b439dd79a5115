"""Line charts as SVG, written by hand: small, readable on a light and on a dark ground.

``chart`` knows nothing of models; ``write_plot`` makes the picture of a ``bench model`` report.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

_WIDTH, _HEIGHT = 420, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 34, 40
# Of middle lightness: they stand out from white and from black.
_COLOURS = ("#2a7fd4", "#d9741a", "#3a9a4c", "#a35bc2")
_STYLE = (
    "text{font:11px sans-serif;fill:#24292f}.t{font-size:13px;font-weight:bold}"
    ".g{stroke:#8c959f;stroke-width:.5;opacity:.5}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}}"
)


@dataclass(frozen=True, slots=True)
class Series:
    """One line: points (x, y), and for each the least and greatest y."""

    label: str
    points: tuple[tuple[float, float], ...]
    ranges: tuple[tuple[float, float], ...] = ()


def chart(title: str, x_label: str, series: Sequence[Series], left: float = 0) -> str:
    """An SVG group ``_WIDTH`` wide, from x = ``left`` on. The y axis begins at 0."""
    xs = [x for line in series for x, _ in line.points]
    ys = [y for line in series for _, y in line.points]
    ys += [high for line in series for _, high in line.ranges]
    highest_x, highest_y = max([*xs, 1.0]), _round_up(max([*ys, 1e-9]))
    wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return _LEFT + wide * x / highest_x, _TOP + high * (1 - y / highest_y)

    parts = [f'<g transform="translate({left:g},0)">', _text(_LEFT, 18, title, "start", "t")]
    for step in range(5):
        x, y = at(0, highest_y * step / 4)
        parts.append(f'<path class="g" d="M{x:.1f} {y:.1f}h{wide}"/>')
        parts.append(_text(x - 6, y + 4, f"{highest_y * step / 4:.4g}", "end"))
    shown: list[float] = []
    for tick in sorted(set(xs)):
        x, y = at(tick, 0)
        if not shown or x - shown[-1] > 34:  # labels that would touch are left out
            shown.append(x)
            parts.append(_text(x, y + 16, f"{tick:,g}", "middle"))
    parts.append(_text(_LEFT + wide / 2, _HEIGHT - 6, x_label, "middle"))
    for number, line in enumerate(series):
        colour = _COLOURS[number % len(_COLOURS)]
        for (x, _), (low, top) in zip(line.points, line.ranges):
            (px, y0), (_, y1) = at(x, low), at(x, top)
            parts.append(f'<path stroke="{colour}" d="M{px:.1f} {y0:.1f}V{y1:.1f}"/>')
        places = [at(x, y) for x, y in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        if len(series) > 1:
            parts.append(
                f'<text x="{_WIDTH - _RIGHT}" y="{_TOP + 12 + 14 * number}" text-anchor="end" '
                f'style="fill:{colour}">{escape(line.label)}</text>'
            )
    return "".join(parts) + "</g>"


def picture(charts: Sequence[str], description: str) -> str:
    """A whole SVG file of charts beside each other, each made with its own ``left``."""
    width = _WIDTH * max(len(charts), 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT}" '
        f'width="{width}" height="{_HEIGHT}" role="img"><title>{escape(description)}</title>'
        f"<style>{_STYLE}</style>{''.join(charts)}</svg>\n"
    )


def write_plot(report: dict[str, Any], path: Path) -> None:
    """Decode and prefill rates over context. OSError when the file cannot be written."""
    whole = report.get("whole", {})
    charts: list[str] = []
    for title, key, x_key, x_label in (
        ("decode, tok/s", "decode", "context_tokens", "tokens in context"),
        ("prefill, tok/s", "prefill", "prompt_tokens", "tokens of the prompt"),
    ):
        rows = report[key]
        if whole:
            # The cut that was measured is many times faster: on one axis the rest would be flat.
            rows = [{x_key: row[x_key], **row["extrapolated"]} for row in whole[key]]
            title = f"extrapolated {title}"
        if rows:
            line = _series(key, rows, x_key)
            charts.append(chart(title, x_label, [line], left=_WIDTH * len(charts)))
    name = f"{report['model']} on {report['machine']['cpu'] or 'unknown processor'}"
    path.write_text(picture(charts, name), "utf-8")


def _series(label: str, rows: Sequence[dict[str, Any]], x_key: str) -> Series:
    rate = "tokens_per_second"
    return Series(
        label,
        tuple((float(row[x_key]), float(row[f"{rate}_median"])) for row in rows),
        tuple((float(row[f"{rate}_min"]), float(row[f"{rate}_max"])) for row in rows),
    )


def _round_up(value: float) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten."""
    power: float = 10.0 ** math.floor(math.log10(value))
    return next(power * step for step in (1, 2, 2.5, 5, 10) if power * step >= value * 0.999)


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(text)}</text>'
