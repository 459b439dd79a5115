"""``moechat bench model`` and ``moechat bench --synthetic``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moechat.cli import options

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        help="A name that `moechat list` shows, a folder, or a GGUF file.", metavar="[MODEL]"
    ),
]
Synthetic = Annotated[
    str | None,
    typer.Option(
        "--synthetic", metavar="NAME", help="NAME's shapes with random weights: nothing is fetched."
    ),
]


def _integer(least: int) -> Any:
    """A parser of whole numbers from ``least`` on."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise typer.BadParameter(f"{text[:40]!a} is no whole number of {least} or more")
        return value

    return parse


def _count(flag: str, help_: str, least: int = 1) -> Any:
    return typer.Option(flag, parser=_integer(least), metavar="N", help=help_)


Layers = Annotated[
    int | None, _count("--layers", "Layers with experts to build; default: what fits in memory.")
]
Experts = Annotated[
    int | None,
    _count("--experts", "Experts to build in a layer. A token reads as many bytes as with all."),
]
Vocab = Annotated[int | None, _count("--vocab", "Tokens of the vocabulary to build.")]
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="fp8|int4|bf16|mxfp4",
        help="Every linear layer in this format; default: the model's own.",
    ),
]
Keep = Annotated[bool, typer.Option("--keep", help="Keep what was built for the next run.")]
Threads = Annotated[
    int | None, _count("--threads", "CPU threads. Default: all CPUs that may be used.")
]
Repetitions = Annotated[int, _count("--repetitions", "Bursts of each figure.")]
MaxContext = Annotated[int, _count("--max-context", "The longest prompt and context.")]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE.svg", help="Draw tokens a second over context."),
]


def bench_model(
    model: ModelArgument = None,
    synthetic: Synthetic = None,
    layers: Layers = None,
    experts: Experts = None,
    vocab: Vocab = None,
    format_: Format = None,
    keep: Keep = False,
    threads: Threads = None,
    repetitions: Repetitions = 5,
    max_context: MaxContext = 4096,
    plot: Plot = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> int:
    """Measure prefill and decode of a whole model.

    Bursts of decoding alternate with bursts of plainly reading the same files: how near decoding
    comes to that is told as a ratio. What a token costs besides is the fixed cost.

    \b
      moechat bench model mini
      moechat bench model /path/to/folder --max-context 16384 --plot speed.svg
      moechat bench --synthetic deepseek-v3
      moechat bench --synthetic kimi-k2-thinking --layers 1 --json

    With --synthetic a few layers of NAME's real shapes are built with random weights in the cache
    folder, and removed at the end. Time a layer is measured, the whole model's is extrapolated.
    """
    from moechat.bench.model_run import measure, print_report
    from moechat.cli.interrupt import Interrupt

    with Interrupt():
        report = measure(
            model,
            synthetic,
            layers=layers,
            experts=experts,
            vocab=vocab,
            format_=format_,
            keep=keep,
            threads=threads,
            repetitions=repetitions,
            max_context=max_context,
            plot=plot,
        )
    print_report(report, as_json=as_json)
    return 0


def bench(
    context: typer.Context,
    synthetic: Synthetic = None,
    layers: Layers = None,
    experts: Experts = None,
    vocab: Vocab = None,
    format_: Format = None,
    keep: Keep = False,
    threads: Threads = None,
    repetitions: Repetitions = 5,
    max_context: MaxContext = 4096,
    plot: Plot = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> int:
    """Measure this machine.

    The options are those of --synthetic, which tells what a model that is not here would do.

    \b
      moechat bench model mini
      moechat bench --synthetic deepseek-v3
    """
    if context.invoked_subcommand is not None:
        if synthetic is not None:
            raise typer.BadParameter("--synthetic goes without a sub-command, or after `model`")
        return 0
    return bench_model(
        None,
        synthetic,
        layers,
        experts,
        vocab,
        format_,
        keep,
        threads,
        repetitions,
        max_context,
        plot,
        as_json,
    )


def add(app: typer.Typer) -> None:
    """Register the subcommand ``model`` and, in place of any callback, ``bench --synthetic``."""
    app.command("model")(bench_model)
    app.callback(invoke_without_command=True)(bench)
