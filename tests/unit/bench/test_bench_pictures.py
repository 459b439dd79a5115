"""The pictures: valid SVG with every figure in it, PNG of the same, errors before measuring."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree

import pytest

from moechat.bench.drawing import Drawing, PlotUnavailable, axis_step, check_plot_path
from moechat.bench.pictures import rates, roofline
from moechat.errors import Usage

NAMESPACE = "{http://www.w3.org/2000/svg}"


def row(format_, threads, achieved, read, batch=1):
    return {
        "op": "moe_ffn",
        "format": format_,
        "isa": "avx2",
        "threads": threads,
        "batch": batch,
        "weight_gb_per_s": achieved,
        "weight_gb_per_s_min": achieved * 0.9,
        "weight_gb_per_s_max": achieved * 1.1,
        "read_gb_per_s": read,
        "fraction_of_read": round(achieved / read, 4),
    }


@pytest.fixture
def report():
    return {
        "shape": {"name": "a <b> & c"},
        "machine": {"cpu": "Some CPU <1>"},
        "settings": {"bursts": 7},
        "rows": [row("fp8", 1, 20.5, 41.0), row("fp8", 2, 52.25, 71.0), row("bf16", 2, 63.5, 72.0)],
    }


def test_the_picture_is_xml_with_the_values(report):
    root = ElementTree.fromstring(roofline(report).svg())
    assert root.tag == f"{NAMESPACE}svg"
    texts = "\n".join(element.text or "" for element in root.iter())
    assert "a <b> & c" in texts and "Some CPU <1>" in texts and "avx2" in texts
    for label in ("fp8, 1 thread:", "fp8, 2 threads:", "bf16, 2 threads:"):
        assert label in texts
    for value in ("20.5 of 41 GB/s", "52.25 of 71 GB/s", "63.5 of 72 GB/s"):
        assert value in texts
    assert {"0.50", "0.74", "0.88"} <= set(texts.splitlines())


def test_bars_are_in_proportion_and_within_the_picture(report):
    root = ElementTree.fromstring(roofline(report).svg())
    width = float(root.get("width"))
    tracks, bars = (
        [float(r.get("width")) for r in root.iter(f"{NAMESPACE}rect") if r.get("class") == kind]
        for kind in ("track", "bar")
    )
    assert [bar / track for bar, track in zip(bars, tracks)] == pytest.approx(
        [20.5 / 41, 52.25 / 71, 63.5 / 72], rel=1e-2
    )
    assert tracks[1] / tracks[0] == pytest.approx(71 / 41, rel=1e-2)
    for rect in root.iter(f"{NAMESPACE}rect"):
        if rect.get("class") != "paper":
            assert float(rect.get("x")) + float(rect.get("width")) <= width


def test_batches_are_told_apart(report):
    report["rows"].append(row("fp8", 2, 50.0, 70.0, batch=8))
    assert "fp8, 2 threads, batch 8:" in roofline(report).svg()
    assert "fp8, 2 threads, batch 1:" in roofline(report).svg()


def test_a_reading_slower_than_the_kernel_fits_too(report):
    report["rows"] = [row("fp8", 2, 13.0, 12.0)]
    root = ElementTree.fromstring(roofline(report).svg())
    points = " ".join(line.get("points") for line in root.iter(f"{NAMESPACE}polyline")).split()
    assert max(float(point.split(",")[0]) for point in points) <= float(root.get("width"))


@pytest.mark.parametrize("greatest", [0.013, 0.99, 1.0, 4.2, 9.99, 10.0, 77.0, 500.0, 1234.0])
def test_the_axis_has_a_few_round_steps(greatest):
    step = axis_step(greatest)
    assert 1 <= greatest / step <= 10.001
    assert float(f"{step:.0e}") == pytest.approx(step) and f"{step:.0e}"[0] in "125"


def test_both_kinds_are_written(report, tmp_path):
    roofline(report).write(tmp_path / "r.svg")
    assert ElementTree.parse(tmp_path / "r.svg").getroot().tag == f"{NAMESPACE}svg"
    pytest.importorskip("matplotlib")
    roofline(report).write(tmp_path / "r.png")
    assert (tmp_path / "r.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_picture_that_could_not_be_written_is_refused_early(tmp_path, monkeypatch):
    check_plot_path(tmp_path / "r.svg")
    with pytest.raises(Usage, match=r"\.svg or \.png"):
        check_plot_path(tmp_path / "r.jpg")
    with pytest.raises(Usage, match="folder"):
        check_plot_path(tmp_path / "none" / "r.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlotUnavailable, match=r"\.svg.*moechat\[plot\]"):
        check_plot_path(tmp_path / "r.png")


def rate(tokens, key, middle):
    ends = {"median": middle, "min": middle * 0.8, "max": middle * 1.2}
    return {key: tokens} | {f"tokens_per_second_{end}": value for end, value in ends.items()}


@pytest.fixture
def model_report():
    return {
        "model": "x & y",
        "threads": 2,
        "machine": {"cpu": None},
        "repetitions": 3,
        "decode": [rate(0, "context_tokens", 5.0), rate(1024, "context_tokens", 2.5)],
        "prefill": [rate(128, "prompt_tokens", 80.0)],
    }


def test_rates_are_points_in_proportion(model_report):
    root = ElementTree.fromstring(rates(model_report).svg())
    assert "x & y: tokens a second" in [text.text for text in root.iter(f"{NAMESPACE}text")]
    decode, prefill = (
        [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        for line in root.iter(f"{NAMESPACE}polyline")
        if line.get("class") == "bar"
    )
    (_, high), (_, low) = decode
    axis = [
        float(text.get("y")) - 4
        for text in root.iter(f"{NAMESPACE}text")
        if text.text == "0" and text.get("text-anchor") == "end"
    ]
    assert (axis[0] - high) / (axis[0] - low) == pytest.approx(2, rel=1e-2)
    assert len(prefill) == 1 and prefill[0][0] > decode[1][0]


def test_of_a_synthetic_model_the_whole_one_is_drawn(model_report):
    extrapolated = rate(0, "context_tokens", 0.5)
    whole = {"decode": [{"context_tokens": 0, "extrapolated": extrapolated}], "prefill": []}
    text = rates(model_report | {"whole": whole}).svg()
    assert "extrapolated, decode" in text and "prefill" not in text


def test_texts_are_escaped_and_dark_pages_have_their_colours(tmp_path):
    drawing = Drawing(100, 50, "<title>")
    drawing.text(1, 1, "a < b $x$")
    drawing.rectangle(1, 2, 3, 4, "bar", "<hint>")
    root = ElementTree.fromstring(drawing.svg())
    assert {"<title>", "a < b $x$", "<hint>"} <= {element.text for element in root.iter()}
    assert "prefers-color-scheme: dark" in drawing.svg()
