"""The roofline picture as PNG, by matplotlib (the extra ``plot``)."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moechat.bench.roofline_plot import Bar


def draw_png(bars: Sequence[Bar], title: str, subtitle: str, path: Path) -> None:
    """Horizontal bars of GB/s under a mark for plain reading, their ratio beside them."""
    # Without pyplot: no window system is looked for. By name: it may not be installed where types
    # are checked.
    figure = import_module("matplotlib.figure").Figure(
        figsize=(8, 1.4 + 0.34 * len(bars)), dpi=150, layout="constrained"
    )
    axes = figure.add_subplot()
    places = range(len(bars))
    achieved = [bar.achieved for bar in bars]
    axes.barh(places, [bar.roof for bar in bars], height=0.5, color="#dfe5ec")
    axes.barh(places, achieved, height=0.5, color="#2f6fdb")
    axes.hlines(places, [b.low for b in bars], [b.high for b in bars], color="#1c2430", lw=1)
    for place, bar in enumerate(bars):
        axes.vlines(bar.roof, place - 0.38, place + 0.38, color="#1c2430", lw=2.5)
        axes.annotate(
            f"{bar.fraction:.2f}", (1.01, place), xycoords=axes.get_yaxis_transform(), va="center"
        )
    axes.set_title("of reading", loc="right", fontsize=9, color="#5b6675")
    axes.set_yticks(list(places), [bar.label for bar in bars])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("GB/s (bar: weights, line: plain reading, thin: range)")
    axes.grid(axis="x", color="#e3e7ec")
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.suptitle(f"{title}\n{subtitle}", fontsize=10, x=0.02, ha="left")
    figure.savefig(path, format="png")
