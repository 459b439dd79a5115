"""The roofline picture: valid SVG with every figure in it, and errors before measuring."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree

import pytest

from moechat.bench.roofline_plot import PlotUnavailable, axis_step, check_plot_path, svg, write_plot
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
    root = ElementTree.fromstring(svg(report))
    assert root.tag == f"{NAMESPACE}svg"
    texts = "\n".join(element.text or "" for element in root.iter())
    assert "a <b> & c" in texts and "Some CPU <1>" in texts and "avx2" in texts
    for label in ("fp8, 1 thread:", "fp8, 2 threads:", "bf16, 2 threads:"):
        assert label in texts
    for value in ("20.5 of 41 GB/s", "52.25 of 71 GB/s", "63.5 of 72 GB/s"):
        assert value in texts
    assert {"0.50", "0.74", "0.88"} <= set(texts.splitlines())


def test_bars_are_in_proportion_and_within_the_picture(report):
    root = ElementTree.fromstring(svg(report))
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
        assert float(rect.get("x", 0)) + float(rect.get("width")) <= width


def test_batches_are_told_apart(report):
    report["rows"].append(row("fp8", 2, 50.0, 70.0, batch=8))
    assert "fp8, 2 threads, batch 8:" in svg(report)
    assert "fp8, 2 threads, batch 1:" in svg(report)


def test_a_reading_slower_than_the_kernel_fits_too(report):
    report["rows"] = [row("fp8", 2, 13.0, 12.0)]
    root = ElementTree.fromstring(svg(report))
    ends = [float(line.get("x2")) for line in root.iter(f"{NAMESPACE}line")]
    assert max(ends) <= float(root.get("width"))


@pytest.mark.parametrize("greatest", [0.013, 0.99, 1.0, 4.2, 9.99, 10.0, 77.0, 500.0, 1234.0])
def test_the_axis_has_a_few_round_steps(greatest):
    step = axis_step(greatest)
    assert 1 <= greatest / step <= 10.001
    assert float(f"{step:.0e}") == pytest.approx(step) and f"{step:.0e}"[0] in "125"


def test_both_kinds_are_written(report, tmp_path):
    write_plot(report, tmp_path / "r.svg")
    assert ElementTree.parse(tmp_path / "r.svg").getroot().tag == f"{NAMESPACE}svg"
    pytest.importorskip("matplotlib")
    write_plot(report, tmp_path / "r.png")
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
