"""A drawing of texts, lines and bars: as SVG by hand, for light and dark pages, or as PNG."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from moechat.errors import MoechatError, Usage

# Colours by what they are for, on a light and on a dark page.
_COLOURS = {
    "paper": ("#ffffff", "#14181f"),
    "ink": ("#1c2430", "#e6eaf0"),
    "soft": ("#5b6675", "#98a3b3"),
    "grid": ("#e3e7ec", "#2a313b"),
    "track": ("#dfe5ec", "#2d3643"),
    "bar": ("#2f6fdb", "#6ba1ff"),
    # Lines of one chart, told apart in either, also by most of the colour-blind.
    "series0": ("#1c2430", "#e6eaf0"),
    "series1": ("#0072b2", "#56b4e9"),
    "series2": ("#009e73", "#2ec99b"),
    "series3": ("#d55e00", "#ff8a3d"),
    "series4": ("#8a6d00", "#f0e442"),
    "series5": ("#cc3d8f", "#f08cc4"),
    "series6": ("#6f4fc4", "#b39bff"),
    "series7": ("#7a8797", "#aab4c2"),
    "series8": ("#a03028", "#ff7a70"),
}
_PNG_SCALE = 2  # pixels of a PNG for one of the drawing


class PlotUnavailable(MoechatError):
    """The library that a picture's file type needs is not installed."""

    name, exit_code = "plot-unavailable", 2


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


def axis_step(greatest: float) -> float:
    """A round step (1, 2 or 5 times a power of ten) that cuts the axis into 4 to 10 parts."""
    power = 10.0 ** math.floor(math.log10(greatest))
    return next(step * power for step in (0.1, 0.2, 0.5, 1) if greatest / (step * power) <= 10)


@dataclass
class Drawing:
    """Shapes on ``width`` x ``height`` units, y downward. ``colour`` is a key of _COLOURS.

    Every method adds one shape; ``write`` makes a file of them.
    """

    width: float
    height: float
    title: str
    _shapes: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def text(
        self, x: float, y: float, text: str, colour: str = "ink", anchor: str = "start",
        size: int = 12,
    ) -> None:  # fmt: skip
        """At its baseline; ``anchor`` is start, middle or end."""
        values = {"x": x, "y": y, "text": text, "colour": colour, "anchor": anchor, "size": size}
        self._shapes.append(("text", values))

    def line(
        self, points: Sequence[tuple[float, float]], colour: str = "ink", width: float = 1
    ) -> None:
        """From point to point."""
        self._shapes.append(("line", {"points": points, "colour": colour, "width": width}))

    def rectangle(
        self, x: float, y: float, width: float, height: float, colour: str, hint: str = ""
    ) -> None:
        """Filled; ``hint`` is shown where a pointer rests on it."""
        values = {"x": x, "y": y, "width": width, "height": height, "colour": colour, "hint": hint}
        self._shapes.append(("rectangle", values))

    def write(self, path: Path) -> None:
        """As the kind of file that its name asks for. OSError when it cannot be written."""
        if path.suffix == ".svg":
            path.write_text(self.svg(), "utf-8")
        else:
            self._write_png(path)

    def svg(self) -> str:
        """A self-contained document."""
        size = f"{self.width:g} {self.height:g}"
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" '
            f'width="{self.width:g}" height="{self.height:g}" role="img">',
            f"<title>{escape(self.title)}</title><style>{_style()}</style>",
            '<rect class="paper" width="100%" height="100%"/>',
            *(_svg_shape(kind, values) for kind, values in self._shapes),
        ]
        return "\n".join([*parts, "</svg>"]) + "\n"

    def _write_png(self, path: Path) -> None:
        # Without pyplot: no window system is looked for. By name: it may not be installed where
        # types are checked.
        figure = import_module("matplotlib.figure").Figure(
            figsize=(self.width / 100, self.height / 100), dpi=100 * _PNG_SCALE
        )
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, self.width), ylim=(self.height, 0))
        axes.axis("off")
        points_per_unit = 72 / 100
        anchors = {"start": "left", "middle": "center", "end": "right"}
        for order, (kind, shape) in enumerate(self._shapes, 2):
            common = {"color": _COLOURS[shape["colour"]][0], "zorder": order}
            if kind == "text":
                size = shape["size"] * points_per_unit
                place = {"ha": anchors[shape["anchor"]], "va": "baseline", "fontsize": size}
                axes.text(
                    shape["x"], shape["y"], shape["text"], parse_math=False, **place, **common
                )
            elif kind == "line":
                xs, ys = zip(*shape["points"])
                axes.plot(xs, ys, linewidth=shape["width"] * points_per_unit, **common)
            else:
                x, y, right = shape["x"], shape["y"], shape["x"] + shape["width"]
                axes.fill_between([x, right], y, y + shape["height"], linewidth=0, **common)
        figure.savefig(path, format="png")


def _style() -> str:
    def rules(page: int) -> str:
        return " ".join(
            f"text.{name}, rect.{name} {{ fill: {colours[page]} }} "
            f".{name} {{ stroke: {colours[page]} }}"
            for name, colours in _COLOURS.items()
        )

    return (
        f"{rules(0)} @media (prefers-color-scheme: dark) {{ {rules(1)} }} "
        "text { font-family: system-ui, sans-serif } text, rect { stroke: none !important } "
        "polyline { fill: none }"
    )


def _svg_shape(kind: str, shape: dict[str, Any]) -> str:
    common = f'class="{shape["colour"]}"'
    if kind == "text":
        place = f'x="{shape["x"]:.1f}" y="{shape["y"]:.1f}" text-anchor="{shape["anchor"]}"'
        return f'<text {common} {place} font-size="{shape["size"]}">{escape(shape["text"])}</text>'
    if kind == "line":
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape["points"])
        return f'<polyline {common} stroke-width="{shape["width"]}" points="{points}"/>'
    place = " ".join(f'{name}="{shape[name]:.1f}"' for name in ("x", "y", "width", "height"))
    hint = f"<title>{escape(shape['hint'])}</title>" if shape["hint"] else ""
    return f'<rect {common} {place} rx="2">{hint}</rect>'
