"""``bench model`` and ``bench --synthetic`` from settings to output, whoever parsed the flags."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from moechat.bench.model import (
    DEFAULT_MAX_CONTEXT,
    DEFAULT_REPETITIONS,
    ModelSettings,
    measure_model,
)
from moechat.bench.model_plot import write_plot
from moechat.bench.model_progress import StatusLine
from moechat.bench.model_report import aligned, lines, tables
from moechat.bench.synthetic import SyntheticSettings, measure_synthetic
from moechat.bench.synthetic_cut import Wishes
from moechat.bench.synthetic_report import synthetic_lines, synthetic_tables
from moechat.errors import Usage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags, for a command line without typer."""
    parser.add_argument("model", nargs="?", help="a name, a folder or a GGUF file")
    parser.add_argument("--synthetic", metavar="NAME", help="shapes of NAME with random weights")
    parser.add_argument("--layers", type=int, help="synthetic: layers with experts")
    parser.add_argument("--experts", type=int, help="synthetic: experts of a layer")
    parser.add_argument("--vocab", type=int, help="synthetic: tokens of the vocabulary")
    parser.add_argument("--format", help="synthetic: fp8, int4, bf16 or mxfp4")
    parser.add_argument("--keep", action="store_true", help="synthetic: keep the folder")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repetitions", type=int, default=DEFAULT_REPETITIONS)
    parser.add_argument("--max-context", type=int, default=DEFAULT_MAX_CONTEXT)
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    parser.add_argument("--json", action="store_true")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure what ``add_arguments`` parsed; the report. Raises MoechatError classes."""
    return measure(
        arguments.model,
        arguments.synthetic,
        layers=arguments.layers,
        experts=arguments.experts,
        vocab=arguments.vocab,
        format_=arguments.format,
        keep=arguments.keep,
        threads=arguments.threads,
        repetitions=arguments.repetitions,
        max_context=arguments.max_context,
        plot=arguments.plot,
    )


def measure(
    model: str | None,
    synthetic: str | None,
    *,
    layers: int | None = None,
    experts: int | None = None,
    vocab: int | None = None,
    format_: str | None = None,
    keep: bool = False,
    threads: int | None = None,
    repetitions: int = DEFAULT_REPETITIONS,
    max_context: int = DEFAULT_MAX_CONTEXT,
    plot: Path | None = None,
) -> dict[str, Any]:
    """One of ``model`` and ``synthetic``; the report, and its picture if ``plot`` names a file.

    Progress goes to stderr when that is a terminal. Raises Usage, ModelNotFound, DoesNotFit.
    """
    if (model is None) == (synthetic is None):
        raise Usage(
            "one model is needed",
            "both MODEL and --synthetic NAME were given" if model else "none was given",
            "`moechat bench model mini` or `moechat bench --synthetic deepseek-v3`",
        )
    cuts = {"--layers": layers, "--experts": experts, "--vocab": vocab, "--format": format_}
    given = [name for name, value in cuts.items() if value is not None] + ["--keep"] * keep
    if synthetic is None and given:
        raise Usage(f"{given[0]} goes with --synthetic", "a model that is here is not changed")
    if plot is not None and plot.suffix != ".svg":
        raise Usage(f"--plot {str(plot)[:80]!a} is not possible", "the name must end in .svg")
    common = {"threads": threads, "repetitions": repetitions, "max_context": max_context}
    with StatusLine(sys.stderr) as status:
        if synthetic is not None:
            settings = SyntheticSettings(
                **common,  # type: ignore[arg-type]
                wishes=Wishes(layers, experts, vocab),
                format=format_,
                keep=keep,
            )
            report = measure_synthetic(synthetic, settings, status.show, status.written)
        else:
            assert model is not None
            plain = ModelSettings(**common)  # type: ignore[arg-type]
            report = measure_model(model, plain, status.show)
    if plot is not None:
        write_plot(report, plot)
    return report


def print_report(report: dict[str, Any], *, as_json: bool) -> None:
    """To stdout: one JSON object, or text."""
    if as_json:
        print(json.dumps(report, indent=2))
        return
    synthetic = bool(report["synthetic"])
    for line in [*lines(report), *(synthetic_lines(report) if synthetic else [])]:
        print(line)
    for title, table in [*tables(report), *(synthetic_tables(report) if synthetic else [])]:
        print(f"\n{title}")
        for line in aligned(table):
            print(line)
