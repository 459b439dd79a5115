"""``bench model`` and ``--synthetic`` from flags to output, on small shapes."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from xml.etree import ElementTree

import pytest
import typer
from moechat.bench.model_plot import Series, chart, picture
from moechat.bench.model_report import lines
from moechat.bench.model_run import add_arguments, measure, print_report, run
from moechat.bench.synthetic_folder import synthetic_root
from tiny_shapes import tiny_entry
from typer.testing import CliRunner

from moechat.cli import bench_model
from moechat.errors import DoesNotFit, ModelNotFound, PromptTooLong, Usage
from moechat.registry import Registry, load_registry

SMALL = {"repetitions": 2, "max_context": 128, "threads": 2}


@pytest.fixture
def tiny_registry(monkeypatch):
    """Small shapes under the names of the models they are of."""
    entries = load_registry().entries
    names = ("deepseek-v3", "gpt-oss-20b", "olmoe-1b-7b")
    registry = Registry(entries | {name: tiny_entry(name) for name in names})
    monkeypatch.setattr("moechat.bench.synthetic.load_registry", lambda: registry)


def check_units(value, key=""):
    """Every number's key ends in what it counts, or names a count of things."""
    if isinstance(value, dict):
        for name, item in value.items():
            check_units(item, name)
    elif isinstance(value, list):
        for item in value:
            check_units(item, key)
    elif isinstance(value, float):
        units = ("seconds", "per_second", "per_s", "per_token", "of_read", "load_average_1_minute")
        assert key.rsplit("_m", 1)[0].endswith(units) or key.endswith(units), key


def test_mini_is_measured():
    report = measure("mini", None, **SMALL)
    json.dumps(report)
    check_units(report)
    assert (report["model"], report["synthetic"], report["threads"]) == ("mini", False, 2)
    assert [row["prompt_tokens"] for row in report["prefill"]] == [128]
    assert [row["context_tokens"] for row in report["decode"]] == [0, 127]
    (row, _) = report["decode"]
    assert row["repetitions"] == 2
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
    assert [row["vocab_tokens"] for row in report["sampling"]] == [8192, 129280]
    assert report["machine"]["usable_cpus"] > 0 and report["versions"]["moechat"]


@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss-20b"])
def test_a_synthetic_model_is_measured_and_extrapolated(tiny_registry, name, capsys):
    report = measure(None, name, layers=2 if name == "deepseek-v3" else 4, **SMALL)
    check_units(report)
    dense = name == "deepseek-v3"
    assert report["built"]["moe_layers"] == (2 if dense else 4)
    whole = report["whole"]
    assert whole["moe_layers"] == (3 if dense else 24)
    for row in whole["decode"]:
        parts = row["measured"]
        total = sum(
            number * parts[f"{part}_seconds_per_token_median"]
            for part, number in (
                ("fixed", 1),
                ("head", 1),
                *([("dense_layer", whole["dense_layers"])] if dense else []),
                ("moe_layer", whole["moe_layers"]),
            )
        )
        assert row["extrapolated"]["seconds_per_token_median"] == pytest.approx(total, rel=1e-2)
    assert [row["prompt_tokens"] for row in whole["prefill"]] == [128]
    assert not any(path.is_dir() for path in synthetic_root().iterdir())
    assert capsys.readouterr() == ("", "")
    print_report(report, as_json=False)
    text = capsys.readouterr().out
    assert "extrapolated: decode of all of " + name in text and "measured: " in text
    assert "built, with random weights in " in text and "\x1b" not in text


def test_text_of_mini_names_the_fixed_cost_and_sampling(capsys):
    print_report(measure("mini", None, **SMALL), as_json=False)
    text = capsys.readouterr().out
    assert "fixed cost a token: " in text and "sampling a token of 129,280: " in text
    assert "CONTEXT" in text and "PROMPT" in text


def test_unsteady_memory_is_told():
    report = measure("mini", None, **SMALL)
    row = report["decode"][0]
    for low, told in ((10.0, True), (20.0, False)):
        row |= {"read_gb_per_s_min": low, "read_gb_per_s_max": 21.0}
        report["decode"] = [row]
        text = "\n".join(lines(report))
        assert ("plain reading went from 10 to 21 GB/s" in text) == told


def test_a_model_of_any_context_is_measured_within_it():
    report = measure("mini", None, repetitions=1, threads=2, max_context=10)
    assert [row["prompt_tokens"] for row in report["prefill"]] == [10]
    assert [row["context_tokens"] for row in report["decode"]] == [0, 9]


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ((None, None), Usage, "one model is needed"),
        (("mini", "deepseek-v3"), Usage, "both"),
        ((None, "deepsek-v3"), ModelNotFound, "deepseek-v3"),
        ((None, "mini"), Usage, "mini"),
        (("no-such-model", None), ModelNotFound, "no-such-model"),
    ],
)
def test_what_cannot_be_measured_is_an_error(arguments, kind, said):
    with pytest.raises(kind) as caught:
        measure(*arguments)
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"layers": 1}, Usage),
        ({"keep": True}, Usage),
        ({"repetitions": 0}, Usage),
        ({"max_context": 0}, Usage),
        ({"threads": 0}, Usage),
    ],
)
def test_flags_that_do_not_fit_a_model_are_usage_errors(options, kind):
    with pytest.raises(kind):
        measure("mini", None, **options)


def test_flags_that_do_not_fit_a_synthetic_model(tiny_registry, monkeypatch, tmp_path):
    with pytest.raises(Usage):
        measure(None, "deepseek-v3", format_="int3")
    with pytest.raises(Usage):
        measure("mini", None, plot=tmp_path / "x.png")
    monkeypatch.setattr("moechat.bench.synthetic.free_ram_bytes", lambda: 1000)
    with pytest.raises(DoesNotFit) as caught:
        measure(None, "deepseek-v3")
    assert caught.value.exit_code == 4 and "0.00 GB of memory" in caught.value.message


def test_the_front_without_typer(tiny_registry, tmp_path):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    plot = tmp_path / "speed.svg"
    line = ["--synthetic", "olmoe-1b-7b", "--layers", "2", "--threads", "2", "--repetitions", "1"]
    report = run(parser.parse_args([*line, "--max-context", "16", "--plot", str(plot)]))
    assert report["synthetic"] and report["format"] == "bf16"
    root = ElementTree.fromstring(plot.read_text())
    assert root.tag.endswith("svg") and "extrapolated decode" in plot.read_text()


def test_nothing_of_a_command_line_is_imported():
    code = (
        "import sys, moechat.bench.model_run\n"
        "print([m for m in ('typer', 'rich', 'prompt_toolkit', 'gguf', 'torch', 'jinja2',"
        " 'tokenizers') if m in sys.modules])"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == "[]"


@pytest.fixture
def command_line():
    """What the group `bench` does with a line: exit code and stdout."""
    app = typer.Typer()
    app.callback()(lambda: None)
    app.command("other")(lambda: None)
    bench_model.add(app)

    def call(*line):
        result = CliRunner().invoke(app, line)
        return result.exit_code, result.stdout, result.exception

    return call


QUICK = ("--threads", "2", "--repetitions", "1", "--max-context", "16", "--json")


def test_the_subcommand(command_line):
    _, out, _ = command_line("model", "mini", *QUICK)
    assert json.loads(out)["model"] == "mini"
    for wrong in (["--layers", "x"], ["--repetitions", "0"], ["--max-context", "-1"]):
        assert command_line("model", "mini", *wrong)[0] == 2
    assert command_line("other")[0] == 0


@pytest.mark.parametrize("words", [[], ["model"]])
def test_synthetic_with_and_without_the_subcommand(tiny_registry, command_line, words):
    line = (*words, "--synthetic", "olmoe-1b-7b", "--layers", "2", "--experts", "8", *QUICK)
    report = json.loads(command_line(*line)[1])
    assert report["synthetic"] and report["built"]["experts"] == 8


def test_the_group_alone_asks_for_a_model_and_a_subcommand_takes_its_own_flags(command_line):
    assert isinstance(command_line()[2], Usage)
    assert command_line("--synthetic", "deepseek-v3", "other")[0] == 2


@pytest.mark.parametrize("when", ["writing", "measuring"])
def test_ctrl_c_leaves_no_folder(when, own_home):
    code = f"""
import signal, sys, time
sys.path.insert(0, {os.path.dirname(__file__)!r})
sys.path.insert(0, {os.path.dirname(os.path.dirname(os.path.dirname(__file__)))!r})
from tiny_shapes import tiny_entry
from moechat.bench import synthetic, synthetic_folder
from moechat.registry import Registry
import moechat.bench.model_run as model_run
synthetic.load_registry = lambda: Registry({{"olmoe-1b-7b": tiny_entry("olmoe-1b-7b")}})
say = lambda text: print(text, flush=True)
def written(done, of):
    if {when!r} == "writing":
        print("writing", flush=True)
        time.sleep(5)
settings = synthetic.SyntheticSettings(threads=2, repetitions=100000, max_context=100)
from moechat.cli.interrupt import Interrupt
try:
    with Interrupt():
        synthetic.measure_synthetic("olmoe-1b-7b", settings, say, written)
except KeyboardInterrupt:
    sys.exit(130)
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
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130, process.stderr.read()
    assert not [path for path in synthetic_root().iterdir() if path.is_dir()]


def test_a_context_beyond_the_models_is_not_asked_for(open_engine):
    from moechat.bench.model_measure import DecodeProbe
    from oracles import MINI

    engine = open_engine(MINI, context_tokens=64)
    probe = DecodeProbe(engine, 60)
    assert 1 <= probe.tokens <= 3
    assert probe.seconds_per_token() > 0
    with pytest.raises(PromptTooLong):
        DecodeProbe(engine, 64)


def test_a_chart_is_well_formed_and_escapes_what_it_is_told():
    line = Series("a<b", ((0.0, 5.0), (1024.0, 3.0)), ((4.0, 6.0), (2.0, 3.5)))
    text = picture([chart("x & y", "<tokens>", [line, line])], "<desc>")
    root = ElementTree.fromstring(text)
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == 4
    labels = [item.text for item in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "x & y" in labels and "<tokens>" in labels and labels.count("a<b") == 2
    assert "prefers-color-scheme:dark" in text
    # Of 0 to 10, 5 is in the middle: half of the drawing's height above its lower edge.
    assert 'cy="127.0"' in text
