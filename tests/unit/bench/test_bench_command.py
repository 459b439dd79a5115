"""``bench model`` and ``--synthetic`` from flags to output, on small shapes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tiny_shapes import tiny_entry
from typer.testing import CliRunner

from moechat.bench.__main__ import main
from moechat.bench.command import run_model, run_synthetic
from moechat.bench.model.measure import measure_model
from moechat.bench.model.report import facts, tables
from moechat.bench.settings import ModelSettings
from moechat.bench.synthetic.folder import synthetic_root
from moechat.bench.synthetic.measure import measure_synthetic
from moechat.cli.bench import build_app
from moechat.errors import DoesNotFit, ModelNotFound, PromptTooLong, Usage
from moechat.registry import Registry, load_registry

SMALL = ModelSettings(repetitions=3, max_context=128, threads=2)
QUICK = ("--threads", "2", "--repetitions", "1", "--max-context", "16")


def silent(line):
    pass


def text_of(run, name):
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        run(name, SMALL, as_json=False, plot=None)
    return stdout.getvalue()


@pytest.fixture
def tiny_registry(monkeypatch):
    """Small shapes under the names of the models they are of."""
    entries = load_registry().entries
    names = ("deepseek-v3", "gpt-oss-20b", "olmoe-1b-7b")
    registry = Registry(entries | {name: tiny_entry(name) for name in names})
    monkeypatch.setattr("moechat.bench.settings.load_registry", lambda: registry)


def check_units(value, key=""):
    """Every number's key ends in what it counts, or names a count of things."""
    if isinstance(value, dict):
        for name, item in value.items():
            check_units(item, name)
    elif isinstance(value, list):
        for item in value:
            check_units(item, key)
    elif isinstance(value, float):
        units = ("seconds", "per_second", "per_s", "per_token", "per_prompt", "of_read")
        ratios = ("share_of_time", "imbalance", "load_average_1_minute")
        assert key.rsplit("_m", 1)[0].endswith(units) or key.endswith(units) or key in ratios, key


def test_mini_is_measured():
    report = measure_model("mini", SMALL, silent)
    json.dumps(report)
    check_units(report)
    assert (report["model"], report["synthetic"], report["threads"]) == ("mini", False, 2)
    assert (report["benchmark"], report["repetitions"]) == ("model", 3)
    assert [row["prompt_tokens"] for row in report["prefill"]] == [128]
    assert [row["context_tokens"] for row in report["decode"]] == [0, 127]
    (row, _) = report["decode"]
    assert row["seconds_per_token_min"] <= row["seconds_per_token_median"]
    assert row["tokens_per_second_median"] == pytest.approx(
        1 / row["seconds_per_token_median"], rel=1e-3
    )
    weights = report["bytes"]["weight_bytes_per_token"]
    assert weights == pytest.approx(14.25e6, rel=0.01)
    assert row["weight_gb_per_s"] == pytest.approx(
        weights / row["seconds_per_token_median"] / 1e9, rel=1e-3
    )
    assert row["fixed_seconds_per_token_max"] < row["seconds_per_token_max"]
    phases = {phase["phase"] for phase in row["phases"]}
    assert {"experts.gate_up", "experts.down", "head"} <= phases
    for phase in [*row["phases"], *report["prefill"][0]["phases"]]:
        assert 0 < phase["share_of_time"] < 1
        assert phase["imbalance"] is None or 1 <= phase["imbalance"] <= 2
    assert report["prefill"][0]["phases"]
    assert [row["vocab_tokens"] for row in report["sampling"]] == [8192, 129280]
    assert report["machine"]["usable_cpus"] > 0 and report["versions"]["moechat"]


def test_prompts_may_be_read_by_another_device():
    pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")
    settings = ModelSettings(repetitions=1, max_context=64, threads=2, device="torch-cpu")
    report = measure_model("mini", settings, silent)
    assert report["prefill_device"] == "torch-cpu"
    assert "prompts read by torch-cpu" in facts(report)[0]
    shares = {p["phase"]: p["share_of_time"] for p in report["prefill"][-1]["phases"]}
    assert set(shares) == {"layers on torch-cpu", "waiting for weights"}
    assert 0.3 < shares["layers on torch-cpu"] <= 1 and 0 <= shares["waiting for weights"] < 0.7
    table = tables(report)[-1]
    assert table.rows[0][0] == "layers on torch-cpu" and table.rows[-1][0] == "the rest"
    assert "copies of weights run beside" in table.legend
    assert tables(report)[-2].rows[-1][0] == "outside the threads"


@pytest.mark.parametrize(("name", "layers"), [("deepseek-v3", 2), ("gpt-oss-20b", 4)])
def test_a_synthetic_model_is_measured_and_extrapolated(tiny_registry, name, layers, capsys):
    settings = ModelSettings(repetitions=2, max_context=128, threads=2, layers=layers)
    report = measure_synthetic(name, settings, silent)
    check_units(report)
    dense = name == "deepseek-v3"
    assert report["built"]["moe_layers"] == layers
    whole = report["whole"]
    assert whole["moe_layers"] == (3 if dense else 24)
    for row in whole["decode"]:
        parts = row["measured"]
        total = sum(
            number * parts[f"{part}_seconds_per_token_median"]
            for part, number in (
                ("outside_layers", 1),
                ("head", 1),
                *([("dense_layer", whole["dense_layers"])] if dense else []),
                ("moe_layer", whole["moe_layers"]),
            )
        )
        assert row["extrapolated"]["seconds_per_token_median"] == pytest.approx(total, rel=1e-2)
    assert [row["prompt_tokens"] for row in whole["prefill"]] == [128]
    assert not any(path.is_dir() for path in synthetic_root().iterdir())
    assert capsys.readouterr() == ("", "")


def test_text_of_a_synthetic_model_tells_measured_from_extrapolated(tiny_registry):
    text = text_of(run_synthetic, "olmoe-1b-7b")
    for words in (
        "built, with random weights in bf16: ",
        "measured, as built: decode",
        "measured: milliseconds a token of one of each part",
        "extrapolated: decode of all of olmoe-1b-7b",
        "extrapolated: prefill of all of olmoe-1b-7b",
    ):
        assert words in text
    assert "\x1b" not in text


def test_text_of_mini_names_the_fixed_cost_sampling_and_phases():
    text = text_of(run_model, "mini")
    assert "fixed cost a token: " in text and "sampling a token of 129,280 (DeepSeek's" in text
    assert "CONTEXT" in text and "PROMPT" in text
    assert "phases of a token, context 0" in text and "outside the threads" in text
    tables = text[text.index("\nprefill\n") :].splitlines()
    assert len(tables) > 15 and max(map(len, tables)) <= 80  # a terminal's columns


def test_unsteady_memory_is_told():
    report = measure_model("mini", SMALL, silent)
    row = report["decode"][0]
    for low, told in ((10.0, True), (20.0, False)):
        row |= {"read_gb_per_s_min": low, "read_gb_per_s_max": 21.0}
        report["decode"] = [row]
        text = "\n".join(facts(report))
        assert ("plain reading went from 10 to 21 GB/s" in text) == told


def test_a_model_of_any_context_is_measured_within_it():
    settings = ModelSettings(repetitions=1, threads=2, max_context=10)
    report = measure_model("mini", settings, silent)
    assert [row["prompt_tokens"] for row in report["prefill"]] == [10]
    assert [row["context_tokens"] for row in report["decode"]] == [0, 9]


@pytest.mark.parametrize(
    ("run", "name", "kind", "said"),
    [
        (run_synthetic, None, Usage, "bench model mini"),
        (run_synthetic, "deepsek-v3", ModelNotFound, "did you mean deepseek-v3"),
        (run_synthetic, "mini", Usage, "mini"),
        (run_model, "no-such-model", ModelNotFound, "no-such-model"),
    ],
)
def test_what_cannot_be_measured_is_an_error(run, name, kind, said):
    with pytest.raises(kind) as caught:
        run(name, SMALL, as_json=True, plot=None)
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ({"repetitions": "0"}, "--repetitions"),
        ({"max-context": "x"}, "--max-context"),
        ({"threads": "257"}, "1 to 256"),
        ({"layers": "-1"}, "'-1'"),
        ({"experts": ""}, "--experts"),
        ({"format": "int3"}, "int3.*fp8, int4"),
    ],
)
def test_texts_that_make_no_sense_are_usage_errors(texts, words):
    with pytest.raises(Usage, match=words):
        ModelSettings.from_texts(texts)


def test_what_would_be_refused_later_is_refused_early(tiny_registry, monkeypatch):
    for run in (run_model, run_synthetic):
        with pytest.raises(Usage, match=r"\.svg or \.png"):
            run("olmoe-1b-7b", SMALL, as_json=True, plot=Path("x.jpg"))
    monkeypatch.setattr("moechat.bench.synthetic.measure.available_memory_bytes", lambda: 1000)
    with pytest.raises(DoesNotFit) as caught:
        measure_synthetic("deepseek-v3", SMALL, silent)
    assert caught.value.exit_code == 4 and "1 kB of memory" in caught.value.message


def test_the_front_without_typer(tiny_registry, tmp_path, capsys):
    plot = tmp_path / "speed.svg"
    line = ["--synthetic", "olmoe-1b-7b", "--layers", "2", *QUICK]
    assert main([*line, "--json", "--plot", str(plot)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["synthetic"] and report["format"] == "bf16"
    ElementTree.fromstring(plot.read_text())
    assert "extrapolated, decode" in plot.read_text()
    assert main([]) == 2 and "not said what to measure" in capsys.readouterr().err


@pytest.fixture
def command_line():
    """What ``moechat bench`` does with a line: exit code, stdout, exception."""

    def call(*line):
        result = CliRunner().invoke(build_app(), line)
        return result.exit_code, result.stdout, result.exception

    return call


def test_the_subcommand(command_line):
    assert json.loads(command_line("model", "mini", *QUICK, "--json")[1])["model"] == "mini"
    assert command_line("model")[0] == command_line("model", "mini", "--layers", "1")[0] == 2
    for wrong in (["--threads", "x"], ["--repetitions", "0"], ["--max-context", "-1"]):
        assert isinstance(command_line("model", "mini", *wrong)[2], Usage)


def test_synthetic_and_a_subcommand_exclude_each_other(capsys):
    for front in (main, build_app()):
        with pytest.raises(SystemExit) as caught:
            front(["--synthetic", "deepseek-v3", "model", "mini"])
        assert caught.value.code == 2
        assert "exclude each other" in capsys.readouterr().err


def test_synthetic_is_an_option_of_the_group(tiny_registry, command_line):
    line = ("--synthetic", "olmoe-1b-7b", "--layers", "2", "--experts", "8", *QUICK)
    report = json.loads(command_line(*line, "--json")[1])
    assert report["synthetic"] and report["built"]["experts"] == 8


def test_the_group_alone_asks_for_a_model_and_a_subcommand_takes_its_own_flags(command_line):
    assert isinstance(command_line()[2], Usage)
    for before in (("--synthetic", "deepseek-v3"), ("--threads", "2"), ("--json",)):
        assert command_line(*before, "kernels")[0] == 2


@pytest.mark.parametrize(
    ("when", "sent", "exit_code"),
    [
        ("writing", signal.SIGINT, 130),
        ("measuring", signal.SIGINT, 130),
        ("writing", signal.SIGTERM, 143),
        ("measuring", signal.SIGTERM, 143),
        ("measuring", signal.SIGHUP, 129),
    ],
)
def test_signals_leave_no_folder(when, sent, exit_code, own_home):
    code = f"""
import signal, sys, time
sys.path.insert(0, {os.path.dirname(__file__)!r})
sys.path.insert(0, {os.path.dirname(os.path.dirname(os.path.dirname(__file__)))!r})
from tiny_shapes import tiny_entry
from moechat.bench import command, settings
from moechat.bench.__main__ import main
from moechat.registry import Registry
settings.load_registry = lambda: Registry({{"olmoe-1b-7b": tiny_entry("olmoe-1b-7b")}})
def show(self, line):
    print(line, flush=True)
    if line.startswith("writing") and {when!r} == "writing":
        time.sleep(5)
command.StatusLine.show = show
sys.exit(main(["--synthetic", "olmoe-1b-7b", "--repetitions", "1000", "--max-context", "100"]))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wanted = "writing" if when == "writing" else "decode"
    for line in process.stdout:
        if line.startswith(wanted):
            break
    time.sleep(0.2)
    assert [path for path in synthetic_root().iterdir() if path.is_dir()]
    process.send_signal(sent)
    assert process.wait(timeout=20) == exit_code, process.stderr.read()
    assert not [path for path in synthetic_root().iterdir() if path.is_dir()]


def test_a_context_beyond_the_models_is_not_asked_for(open_engine):
    from oracles import MINI

    from moechat.bench.model.probes import DecodeProbe

    engine = open_engine(MINI, context_tokens=64)
    probe = DecodeProbe(engine, 60)
    assert 1 <= probe.tokens <= 3
    assert probe.burst().seconds > 0
    with pytest.raises(PromptTooLong):
        DecodeProbe(engine, 64)
