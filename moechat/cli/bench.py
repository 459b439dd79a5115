"""``moechat bench``: what this machine reaches, next to what its memory would allow."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moechat.bench.settings import (
    CUT_OPTIONS,
    DEVICE_OPTIONS,
    KERNEL_OPTIONS,
    MODEL_OPTIONS,
    KernelSettings,
    ModelSettings,
    Options,
)
from moechat.cli import options
from moechat.cli.device_options import DEVICE_METAVAR, device_name


def build_app() -> typer.Typer:
    """``moechat bench`` and its sub-commands."""
    app = typer.Typer(
        rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]}
    )
    app.callback(invoke_without_command=True)(bench)
    app.command("model")(model)
    app.command("kernels")(kernels)
    return app


def _text(table: Options, name: str, metavar: str, parser: Any = None) -> Any:
    """A text that bench.settings reads; its default and help stand there, too."""
    default, text = table[name]
    if default is not None:
        text += f" Default: {default}."
    return typer.Option(f"--{name}", metavar=metavar, help=text, parser=parser, show_default=False)


Synthetic = Annotated[
    str | None,
    typer.Option(
        "--synthetic",
        metavar="NAME",
        help="NAME's shapes with random weights: nothing is fetched. Any name that `moechat list` "
        "shows, but mini.",
    ),
]
Layers = Annotated[str | None, _text(CUT_OPTIONS, "layers", "N")]
Experts = Annotated[str | None, _text(CUT_OPTIONS, "experts", "N")]
Format = Annotated[str | None, _text(CUT_OPTIONS, "format", "NAME")]
Threads = Annotated[str | None, _text(MODEL_OPTIONS, "threads", "N")]
Repetitions = Annotated[str | None, _text(MODEL_OPTIONS, "repetitions", "N")]
MaxContext = Annotated[str | None, _text(MODEL_OPTIONS, "max-context", "N")]
Device = Annotated[str | None, _text(DEVICE_OPTIONS, "device", DEVICE_METAVAR, parser=device_name)]
Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot", metavar="FILE", help="Write a picture: .svg or .png.", show_default=False
    ),
]


def bench(
    context: typer.Context,
    synthetic: Synthetic = None,
    layers: Layers = None,
    experts: Experts = None,
    format_: Format = None,
    threads: Threads = None,
    repetitions: Repetitions = None,
    max_context: MaxContext = None,
    plot: Plot = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> int:
    """Measure this machine.

    The options are those of --synthetic, which tells what a model that is not here would do: a few
    layers of its real shapes are built with random weights in the cache folder, and removed at the
    end. The time of a layer is measured, the whole model's is extrapolated.

    \b
      moechat bench model mini
      moechat bench --synthetic deepseek-v3
      moechat bench --synthetic kimi-k2-thinking --layers 1 --json
      moechat bench kernels
    """
    if context.invoked_subcommand is None:
        from moechat.bench.command import run_synthetic

        settings = ModelSettings.from_texts(_texts(context))
        run_synthetic(synthetic, settings, as_json=as_json, plot=plot)
        return 0
    if synthetic is not None:
        context.fail(f"--synthetic and `{context.invoked_subcommand}` exclude each other")
    if any(value for name, value in context.params.items() if name != "debug"):
        context.fail(f"options of `{context.invoked_subcommand}` go after that word")
    return 0


def model(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="A name that `moechat list` shows, a folder, or a GGUF file.", metavar="MODEL"
        ),
    ],
    threads: Threads = None,
    repetitions: Repetitions = None,
    max_context: MaxContext = None,
    device: Device = None,
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
    """
    from moechat.bench.command import run_model

    settings = ModelSettings.from_texts(_texts(context))
    run_model(model, settings, as_json=as_json, plot=plot)
    return 0


def kernels(
    context: typer.Context,
    format_: Annotated[str | None, _text(KERNEL_OPTIONS, "format", "NAMES")] = None,
    shape: Annotated[str | None, _text(KERNEL_OPTIONS, "shape", "MODEL")] = None,
    threads: Annotated[str | None, _text(KERNEL_OPTIONS, "threads", "N[,N...]")] = None,
    batch: Annotated[str | None, _text(KERNEL_OPTIONS, "batch", "B[,B...]")] = None,
    experts_hit: Annotated[str | None, _text(KERNEL_OPTIONS, "experts-hit", "same|uniform")] = None,
    experts: Annotated[str | None, _text(KERNEL_OPTIONS, "experts", "N")] = None,
    bursts: Annotated[str | None, _text(KERNEL_OPTIONS, "bursts", "N")] = None,
    isa: Annotated[str | None, _text(KERNEL_OPTIONS, "isa", "NAME")] = None,
    plot: Plot = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> int:
    """Compare the experts' kernels with plain reading of memory.

    Random weights of the model's shapes are mapped from a temporary file that is gone when the
    command ends. One call computes what decode does for the routed experts of a layer: gate and
    up, SwiGLU, down, weighted sum. Calls run in short bursts between bursts of plain reading with
    as many threads; medians of the bursts are shown, and the ratio is what counts.

    \b
      moechat bench kernels
      moechat bench kernels --format fp8 --threads 1,2 --plot roofline.svg
      moechat bench kernels --format int4 --batch 1,8 --experts-hit uniform --json
    """
    from moechat.bench.command import run_kernels

    settings = KernelSettings.from_texts(_texts(context))
    run_kernels(settings, as_json=as_json, plot=plot)
    return 0


def _texts(context: typer.Context) -> dict[str, Any]:
    """What was given, by the names that the options have on the command line."""
    return {name.strip("_").replace("_", "-"): value for name, value in context.params.items()}
