"""The roofline picture of ``bench kernels``: what was achieved, under what reading reaches."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from moechat.errors import MoechatError, Usage

_WIDTH, _LEFT, _RIGHT, _TOP, _ROW, _BAR, _BOTTOM = 800, 230, 84, 74, 30, 14, 58
_STYLE = """
  .paper { fill: #ffffff } .ink { fill: #1c2430 } .soft { fill: #5b6675 } .grid { stroke: #e3e7ec }
  .track { fill: #dfe5ec } .bar { fill: #2f6fdb } .roof, .range { stroke: #1c2430 }
  text { font: 13px system-ui, sans-serif } .title { font-size: 16px; font-weight: 600 }
  .small { font-size: 12px }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #14181f } .ink { fill: #e6eaf0 } .soft { fill: #98a3b3 }
    .grid { stroke: #2a313b } .track { fill: #2d3643 } .bar { fill: #6ba1ff }
    .roof, .range { stroke: #e6eaf0 }
  }
"""


class PlotUnavailable(MoechatError):
    """The library that a picture's file type needs is not installed."""

    name, exit_code = "plot-unavailable", 2


@dataclass(frozen=True, slots=True)
class Bar:
    """One row: GB/s achieved (median, range) and of plain reading, and their ratio."""

    label: str
    achieved: float
    low: float
    high: float
    roof: float
    fraction: float


def check_plot_path(path: Path) -> None:
    """Raise Usage or PlotUnavailable for a picture that could not be written later."""
    if path.suffix not in (".svg", ".png"):
        raise Usage(f"--plot cannot write {path.name[:60]!a}", "a picture is a .svg or .png file")
    folder = path.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or path.is_dir():
        raise Usage(f"--plot cannot write {str(path)[:200]!a}", "there is no such writable folder")
    if path.suffix == ".png":
        try:
            import_module("matplotlib")
        except ImportError:
            raise PlotUnavailable(
                "a .png picture needs matplotlib",
                "it is not installed",
                "Give a .svg file, which needs nothing, or install moechat[plot]",
            ) from None


def write_plot(report: dict[str, Any], path: Path) -> None:
    """Write the picture as the kind of file that its name asks for."""
    if path.suffix == ".svg":
        path.write_text(svg(report), "utf-8")
        return
    from moechat.bench.roofline_png import draw_png

    draw_png(bars(report), *titles(report), path)


def bars(report: dict[str, Any]) -> list[Bar]:
    """The rows of a report as bars, in its order."""
    several_batches = len({row["batch"] for row in report["rows"]}) > 1
    return [
        Bar(
            f"{row['format']}, {row['threads']} thread{'s' * (row['threads'] != 1)}"
            + (f", batch {row['batch']}" if several_batches or row["batch"] != 1 else ""),
            row["weight_gb_per_s"],
            row["weight_gb_per_s_min"],
            row["weight_gb_per_s_max"],
            row["read_gb_per_s"],
            row["fraction_of_read"],
        )
        for row in report["rows"]
    ]


def titles(report: dict[str, Any]) -> tuple[str, str]:
    """What is shown, and on which machine."""
    isa = "+".join(sorted({row["isa"] for row in report["rows"]}))
    return (
        f"Experts of {report['shape']['name']}: weights read, under plain reading",
        f"{report['machine']['cpu'] or 'unknown processor'}, {isa}, medians of "
        f"{report['settings']['bursts']} bursts",
    )


def axis_step(greatest: float) -> float:
    """A round step (1, 2 or 5 times a power of ten) that cuts the axis into 4 to 10 parts."""
    power = 10.0 ** math.floor(math.log10(greatest))
    return next(step * power for step in (0.1, 0.2, 0.5, 1) if greatest / (step * power) <= 10)


def svg(report: dict[str, Any]) -> str:
    """The picture as a self-contained SVG document, for light and dark pages."""
    rows, (title, subtitle) = bars(report), titles(report)
    greatest = max(max(bar.roof, bar.high) for bar in rows) * 1.02
    scale = (_WIDTH - _LEFT - _RIGHT) / greatest
    height = _TOP + _ROW * len(rows) + _BOTTOM
    bottom = _TOP + _ROW * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<rect class="paper" width="{_WIDTH}" height="{height}"/>',
        _text(20, 30, title, "ink title"),
        _text(20, 51, subtitle, "soft small"),
    ]
    step = axis_step(greatest)
    for i in range(int(greatest / step) + 1):
        x = _LEFT + i * step * scale
        parts.append(_line(x, _TOP - 6, x, bottom, "grid", 1))
        parts.append(_text(x, bottom + 18, f"{i * step:g}", "soft small", "middle"))
    parts.append(_text(_WIDTH - _RIGHT, bottom + 38, "GB/s", "soft small", "end"))
    parts.append(
        _text(_LEFT, bottom + 38, "bar: weights · line: plain reading · thin: range", "soft small")
    )
    parts.append(_text(_WIDTH - 20, _TOP - 12, "of reading", "soft small", "end"))
    for i, bar in enumerate(rows):
        parts += _drawn(bar, _TOP + i * _ROW + _ROW / 2, scale)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _drawn(bar: Bar, middle: float, scale: float) -> Sequence[str]:
    top, roof = middle - _BAR / 2, _LEFT + bar.roof * scale
    low, high = _LEFT + bar.low * scale, _LEFT + bar.high * scale
    text = f"{bar.achieved:g} of {bar.roof:g} GB/s"
    return (
        f"<g><title>{escape(f'{bar.label}: {text}, {bar.fraction:g} of reading')}</title>",
        _text(_LEFT - 12, middle + 4.5, bar.label, "ink", "end"),
        _rect(_LEFT, top, bar.roof * scale, "track"),
        _rect(_LEFT, top, bar.achieved * scale, "bar"),
        _line(low, middle, high, middle, "range", 1),
        _line(roof, top - 4, roof, top + _BAR + 4, "roof", 2.5),
        _text(_WIDTH - 20, middle + 4.5, f"{bar.fraction:.2f}", "ink", "end"),
        "</g>",
    )


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str, width: float) -> str:
    place = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line class="{kind}" {place} stroke-width="{width}"/>'


def _rect(x: float, y: float, width: float, kind: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_BAR}"'
    return f'<rect class="{kind}" {place} rx="2"/>'
