"""``eval kv`` by its protocol: what crosses, what is scored, what is counted, what is compared."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from fake_engine import FakeEngine

from moechat.errors import BadParameter, Usage
from moechat.eval.kv import measure_policies
from moechat.eval.needle import Trial
from moechat.eval.picture import quality_over_bytes, write_picture
from moechat.eval.policies import NAMES, Policy, policies_of
from moechat.eval.report import kv_rows, kv_text, label
from moechat.models.spec import LatentAttention

IDS = list(range(10, 31))  # a window of 20 and the token after it
TRIAL = Trial(8, 50.0, "777", [0, 1, 40, 41], [42, 43, 2])
POLICIES = [Policy("native"), Policy("int4"), Policy("pdtrim", 0.5)]
MADE = {
    "native": SimpleNamespace(bytes=8, logit=6.0, tiers=lambda *_: None),
    "int4": SimpleNamespace(bytes=2, logit=5.0, tiers=lambda *_: None),
    "pdtrim": SimpleNamespace(bytes=4, logit=4.0, tiers=lambda *_: None),
}


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(Policy, "make", lambda policy, spec: MADE[policy.name])
    right = {"native": "It is 777", "int4": "It is 777", "pdtrim": "It is 0"}
    names = {id(made): name for name, made in MADE.items()}
    return FakeEngine(lambda session: right[names[id(session.engine.kv_policy)]])


def measure(engine, windows=(IDS, IDS), trials=(TRIAL,), rows=None):
    rows, notes = [] if rows is None else rows, []
    measure_policies(engine, POLICIES, windows, 5, trials, rows, notes, lambda line: None)
    return rows, notes


def test_the_first_tokens_cross_and_the_last_are_scored_in_one_go(engine):
    measure(engine, windows=[IDS])
    (session,) = engine.sessions
    assert session.calls[:3] == [
        ("rewind", 0),
        (None, IDS[:15]),
        ("all", IDS[15:20]),  # predicts IDS[16:]: five tokens
    ]
    assert session.calls[3:5] == [("rewind", 0), (None, TRIAL.document_ids)]
    assert session.closed


def test_only_what_crossed_is_counted(engine):
    rows, _ = measure(engine)
    crossed = 2 * 15 + 4
    assert [row.traffic.tokens for row in rows] == [crossed] * 3
    assert [row.traffic.num_bytes for row in rows] == [8 * crossed, 2 * crossed, 4 * crossed]
    assert all(row.traffic.native_bytes == 8 * crossed for row in rows)
    assert rows[0].traffic.decode_seconds == pytest.approx(2e-6 * crossed)
    assert all(window.tokens == 5 for row in rows for window in row.windows)


def test_a_crossing_that_was_disturbed_spoils_no_time(engine):
    rows = measure(engine)[0][:1]
    rows[0].crossings[1] = replace(rows[0].crossings[1], encode_seconds=9.0, decode_seconds=9.0)
    (row,) = kv_rows(rows)
    assert row["encode_seconds_per_token"] == pytest.approx(1e-6)
    assert row["decode_seconds_per_token"] == pytest.approx(2e-6)


def test_the_progress_is_that_of_the_whole(engine):
    shown = []
    measure_policies(engine, POLICIES, [IDS], 5, [TRIAL] * 2, [], [], shown.append)
    assert shown[:2] == [
        "policy 1 of 3, native: window 1 of 1",
        "policy 1 of 3, native: needle 1 of 2",
    ]
    assert shown[-1] == "policy 3 of 3, pdtrim 0.5: needle 2 of 2" and len(shown) == 9


def test_rows_compare_quality_with_native(engine):
    rows = kv_rows(measure(engine)[0])
    native, int4, pdtrim = rows
    assert (native["perplexity_change_percent"], native["sent_of_fp16"]) == (0, 1)
    assert int4["sent_of_fp16"] == 0.25 and int4["sent_bytes_per_token"] == 2
    assert 0 < int4["perplexity_change_percent"] < pdtrim["perplexity_change_percent"]
    ratio = int4["perplexity"] / native["perplexity"]
    assert int4["perplexity_change_percent"] == pytest.approx(100 * (ratio - 1))
    assert [row["needles"][0]["found"] for row in rows] == [1, 1, 0]
    miss = {"depth_percent": 50.0, "code": "777", "answer": "It is 0"}
    assert pdtrim["needles"] == [{"length_tokens": 8, "trials": 1, "found": 0, "misses": [miss]}]


def test_a_policy_that_cannot_code_the_model_is_left_out(engine, monkeypatch):
    def refuse(*_):
        raise ValueError("no such tier here")

    refusing = SimpleNamespace(tiers=refuse)
    monkeypatch.setitem(MADE, "int4", refusing)
    rows, notes = measure(engine)
    assert [row.policy.name for row in rows] == ["native", "pdtrim"]
    assert notes == ["int4 is left out: no such tier here"]


def test_why_it_is_left_out_is_told_once_and_names_the_attention(engine, monkeypatch):
    def refuse(*_):
        raise BadParameter("the KV policy does not suit the model", "k8v4 needs values")

    latent = object.__new__(LatentAttention)
    monkeypatch.setattr(engine, "spec", SimpleNamespace(attention=latent), raising=False)
    monkeypatch.setitem(MADE, "pdtrim", SimpleNamespace(tiers=refuse))
    notes = []
    policies = [Policy("pdtrim", 0.5), Policy("pdtrim", 0.3)]
    measure_policies(engine, policies, [], 5, [TRIAL], [], notes, lambda line: None)
    assert notes == ["pdtrim is left out: k8v4 needs values, and latent attention has none"]


def test_what_was_measured_before_an_interruption_stays(engine):
    calls = 0

    def check(session):
        nonlocal calls
        calls += 1
        if calls == 9:  # int4's second window is scored; 4 of native, 1 + 2 of its needle, then 2
            raise KeyboardInterrupt

    engine.check = check
    rows = []
    with pytest.raises(KeyboardInterrupt):
        measure(engine, rows=rows, trials=())
    shown = kv_rows(rows)
    assert [row["policy"] for row in shown] == ["native", "int4"]
    assert [row["windows"] for row in shown] == [2, 2]
    rows[1].windows.pop()
    assert kv_rows(rows)[1]["perplexity_change_percent"] > 0  # against native's first window


def test_policies_are_ordered_native_first_and_have_budgets_where_they_use_them():
    chosen = policies_of(["pdtrim", "int4-centred", "int4"], [0.5, 0.3])
    assert [policy.label for policy in chosen] == [
        *("native", "int4-centred", "int4", "pdtrim 0.5", "pdtrim 0.3"),
    ]
    assert [policy.name for policy in policies_of(NAMES, [0.5])] == list(NAMES)


@pytest.mark.parametrize("name", ["", "int3", "int4-", "int4-odd", "-plain", "Int4"])
def test_other_names_are_no_policies(name):
    with pytest.raises(Usage, match="--policies"):
        policies_of([name], [0.5])


@pytest.mark.parametrize("name", [*NAMES, "int4-centred", "spectrum4-plain"])
def test_every_name_makes_a_policy(name):
    pytest.importorskip("moechat.kv.policy")
    from moechat.kv.layout import KVLayout, Part

    halves = (Part(0, 8, "key"), Part(8, 8, "value"))
    policy = Policy(name, 0.5)
    layout = KVLayout(halves)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVLayout, "of", lambda spec: layout)
        made = policy.make(None)
    base = name.partition("-")[0]
    assert made.name == ("spectrum" if base.startswith("spectrum") else base)
    if "-" in name:
        assert made.centre_keys == name.endswith("centred")


def report_of(engine, **more):
    return {
        "model": "fake",
        "compute": "bf16",
        "threads": 1,
        "machine": {"cpu": "a <cpu>"},
        "notes": [],
        "interrupted": False,
        "text": "/somewhere/a.txt",
        "window_tokens": 20,
        "scored_tokens": 5,
        "rows": kv_rows(measure(engine, **more)[0]),
    }


def test_the_picture_has_a_line_a_policy(engine):
    report = report_of(engine)
    report["rows"].append(report["rows"][2] | {"budget": 0.3, "sent_of_fp16": 0.3})
    root = ElementTree.fromstring(quality_over_bytes(report).svg())
    texts = {element.text for element in root.iter() if element.text}
    assert {"native", "int4", "pdtrim", "needles found, %"} <= texts
    hints = [text for text in texts if " of FP16, " in text]
    assert {hint.split(":")[0] for hint in hints} == {label(row) for row in report["rows"]}
    lines = [e for e in root.iter() if e.tag.endswith("polyline") and "series" in e.get("class")]
    assert [line.get("class") for line in lines] == ["series2"] * 2  # one a chart, of pdtrim
    width, height = float(root.get("width")), float(root.get("height"))
    for rectangle in root.iter("{http://www.w3.org/2000/svg}rect"):
        if rectangle.get("x"):
            assert 0 <= float(rectangle.get("x")) < width
            assert 0 <= float(rectangle.get("y")) < height


def rectangles(report):
    """The points of a picture: hint and side."""
    root = ElementTree.fromstring(quality_over_bytes(report).svg())
    found = [r for r in root.iter("{http://www.w3.org/2000/svg}rect") if len(r)]
    return [(r[0].text, float(r.get("width")), float(r.get("y"))) for r in found]


def test_the_picture_tells_errors_sources_and_an_interruption(engine):
    report = report_of(engine)
    report["rows"][1] |= {"perplexity_change_percent": -3.0}
    report["rows"][1] |= {"perplexity_change_standard_error_percent": 4.5}
    svg = quality_over_bytes(report).svg()
    source = "a.txt: 2 windows, 5 of 20 tokens predicted; 1 needle in texts of 8 tokens"
    assert f">{source}<" in svg and ">bytes sent, scales included, over 2 bytes an element<" in svg
    assert "int4: 0.250 of FP16, -3.00 % ± 4.50" in svg
    root = ElementTree.fromstring(svg)
    lines = [e for e in root.iter() if e.tag.endswith("polyline")]
    grid = [
        float(e.get("points").split()[0].split(",")[1]) for e in lines if "grid" in str(e.attrib)
    ]
    bars = [e.get("points") for e in lines if e.get("class") == "series1"]
    ys = [float(point.split(",")[1]) for bar in bars for point in bar.split()]
    assert len(bars) == 3 and max(ys) < max(grid)  # the bar and its two ends
    report["interrupted"] = True
    assert f">interrupted: the figures so far; {source}<" in quality_over_bytes(report).svg()


def test_no_point_hides_another(engine):
    report = report_of(engine, windows=())
    report["rows"] = [row | {"sent_of_fp16": 1.0} for row in report["rows"]]
    report["rows"][2]["needles"] = report["rows"][0]["needles"]
    sides = [side for _, side, _ in rectangles(report)]
    assert sides == sorted(sides, reverse=True) and len(set(sides)) == 3


def test_a_picture_is_written_whole_or_not_at_all(engine, tmp_path, monkeypatch):
    path = tmp_path / "kv.svg"
    path.write_text("old")
    drawing = quality_over_bytes(report_of(engine))

    def fail(self, at):
        at.write_text("half")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(type(drawing), "write", fail)
        with pytest.raises(OSError, match="disk full"):
            write_picture(drawing, path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    write_picture(drawing, path)
    assert path.read_text() == drawing.svg() and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("more", [{"trials": ()}, {"windows": ()}])
def test_half_a_measurement_is_shown_too(engine, more):
    report = report_of(engine, **more)
    ElementTree.fromstring(quality_over_bytes(report).svg())
    assert [type(item).__name__ for item in kv_text(report)][-1] == "Table"


def test_a_row_with_fewer_windows_is_told(engine):
    report = report_of(engine)
    report["rows"][1]["windows"] = 1
    assert "int4: only 1 of 2 windows of the text" in kv_text(report)


def test_the_text_fits_a_terminal(engine):
    for item in kv_text(report_of(engine))[1:]:
        assert sum(max(map(len, column)) + 2 for column in zip(item.head, *item.rows)) <= 80
