"""Pictures of reports: a roofline of ``bench kernels``, rates over context of ``bench model``."""

from __future__ import annotations

from typing import Any

from moechat.bench.drawing import Drawing, axis_step

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 800, 230, 84, 74, 58
_ROW, _BAR = 30, 14
_ROOFLINE_KEY = "bar: kernels · line: plain reading · thin: range of bursts"
_CHART_TOP, _CHART_HEIGHT, _CHART_LEFT, _GAP = 100, 220, 64, 48


def roofline(report: dict[str, Any]) -> Drawing:
    """What was achieved, under what reading reaches: a bar for each row."""
    rows = report["rows"]
    title = f"Experts of {report['shape']['name']}: kernels beside plain reading of memory"
    bottom = _TOP + _ROW * len(rows)
    drawing = Drawing(_WIDTH, bottom + _BOTTOM, title)
    isa = "+".join(sorted({row["isa"] for row in rows}))
    _title(drawing, report, f"{isa}, medians of {report['settings']['bursts']} bursts")
    greatest = 1.02 * max(max(row["read_gb_per_s"], row["weight_gb_per_s_max"]) for row in rows)
    scale = (_WIDTH - _LEFT - _RIGHT) / greatest
    step = axis_step(greatest)
    for i in range(int(greatest / step) + 1):
        x = _LEFT + i * step * scale
        drawing.line([(x, _TOP - 6), (x, bottom)], "grid")
        drawing.text(x, bottom + 18, f"{i * step:g}", "soft", "middle")
    drawing.text(_WIDTH - _RIGHT, bottom + 38, "GB/s", "soft", "end")
    drawing.text(
        _LEFT, bottom + 38, "bar: kernels · line: plain reading · thin: range of bursts", "soft"
    )
    drawing.text(_WIDTH - 20, _TOP - 12, "of reading", "soft", "end")
    several_batches = len({row["batch"] for row in rows}) > 1
    for i, row in enumerate(rows):
        label = f"{row['format']}, {row['threads']} thread{'s' * (row['threads'] != 1)}"
        if several_batches or row["batch"] != 1:
            label += f", batch {row['batch']}"
        _roofline_bar(drawing, row, label, _TOP + i * _ROW + _ROW / 2, scale)
    return drawing


def _roofline_bar(
    drawing: Drawing, row: dict[str, Any], label: str, middle: float, scale: float
) -> None:
    achieved, read = row["weight_gb_per_s"], row["read_gb_per_s"]
    top, roof = middle - _BAR / 2, _LEFT + read * scale
    low, high = (_LEFT + row[f"weight_gb_per_s_{end}"] * scale for end in ("min", "max"))
    fraction = row["fraction_of_read"]
    hint = f"{label}: {achieved:g} of {read:g} GB/s, {fraction:g} of reading"
    drawing.text(_LEFT - 12, middle + 4.5, label, anchor="end")
    drawing.rectangle(_LEFT, top, read * scale, _BAR, "track", hint)
    drawing.rectangle(_LEFT, top, achieved * scale, _BAR, "bar", hint)
    drawing.line([(low, middle), (high, middle)])
    drawing.line([(roof, top - 4), (roof, top + _BAR + 4)], width=2.5)
    drawing.text(_WIDTH - 20, middle + 4.5, f"{fraction:.2f}", anchor="end")


def rates(report: dict[str, Any]) -> Drawing:
    """Tokens a second of decode and of prefill, over context; of a synthetic model the whole's."""
    whole, threads = report.get("whole"), report["threads"]
    kind = "extrapolated, " if whole else ""
    title = f"{report['model']}: tokens a second"
    drawing = Drawing(_WIDTH, _CHART_TOP + _CHART_HEIGHT + 36, title)
    facts = f"{threads} thread{'s' * (threads != 1)}, medians and ranges"
    _title(drawing, report, f"{facts} of {report['repetitions']} bursts")
    wide = (_WIDTH - 2 * _CHART_LEFT - _GAP) / 2
    for number, (key, x_key) in enumerate(
        (("decode", "context_tokens"), ("prefill", "prompt_tokens"))
    ):
        rows = report[key]
        if whole:
            # The cut that was measured is many times faster: on one axis the rest would be flat.
            rows = [{x_key: row[x_key], **row["extrapolated"]} for row in whole[key]]
        left = _CHART_LEFT + number * (wide + _GAP + _CHART_LEFT / 2)
        if rows:
            points = [
                (row[x_key], *(row[f"tokens_per_second_{end}"] for end in ("median", "min", "max")))
                for row in rows
            ]
            label = f"{kind}{key}: tok/s over {x_key.replace('_', ' ')}"
            _chart(drawing, label, points, left, wide)
    return drawing


def _chart(
    drawing: Drawing,
    label: str,
    points: list[tuple[float, float, float, float]],
    left: float,
    wide: float,
) -> None:
    """Points of x, and y with its range; both axes begin at 0."""
    greatest_x, greatest_y = (max(point[of] for point in points) * 1.02 for of in (0, 3))
    bottom = _CHART_TOP + _CHART_HEIGHT

    def at(x: float, y: float) -> tuple[float, float]:
        return left + wide * x / max(greatest_x, 1), bottom - _CHART_HEIGHT * y / greatest_y

    drawing.text(left, _CHART_TOP - 10, label, "soft")
    step = axis_step(greatest_y)
    for i in range(int(greatest_y / step) + 1):
        x, y = at(0, i * step)
        drawing.line([(x, y), (x + wide, y)], "grid")
        drawing.text(x - 6, y + 4, f"{i * step:g}", "soft", "end")
    shown = -100.0
    for x_value, *_ in points:
        x, _ = at(x_value, 0)
        if x - shown > 40:  # labels that would touch are left out
            shown = x
            drawing.text(x, bottom + 18, f"{x_value:,g}", "soft", "middle")
    for x_value, _, low, high in points:
        drawing.line([at(x_value, low), at(x_value, high)])
    places = [at(x, y) for x, y, *_ in points]
    drawing.line(places, "bar", 2)
    for x, y in places:
        drawing.rectangle(x - 3, y - 3, 6, 6, "bar")


def _title(drawing: Drawing, report: dict[str, Any], facts: str) -> None:
    drawing.text(20, 30, drawing.title, size=16)
    cpu = report["machine"]["cpu"] or "unknown processor"
    drawing.text(20, 51, f"{cpu}, {facts}", "soft")
