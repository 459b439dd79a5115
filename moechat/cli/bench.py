"""``moechat bench``: what this machine reaches, next to what its memory would allow."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moechat.cli import bench_model, options


def build_app() -> typer.Typer:
    """The sub-commands of ``moechat bench``."""
    app = typer.Typer(
        rich_markup_mode=None,
        help="Measure this machine.",
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    app.command("kernels")(kernels)
    bench_model.add(app)
    return app


def _option(name: str, metavar: str) -> Any:
    """A text option that KernelSettings reads; its default and help stand there."""
    from moechat.bench.kernel_options import OPTIONS

    default, text = OPTIONS[name]
    if default is not None:
        text += f" Default: {default}."
    return typer.Option(f"--{name}", metavar=metavar, help=text, show_default=False)


Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE.svg|FILE.png",
        help="Write a roofline picture: GB/s achieved, under plain reading.",
        show_default=False,
    ),
]


def kernels(
    format_: Annotated[str | None, _option("format", "NAMES")] = None,
    shape: Annotated[str | None, _option("shape", "MODEL")] = None,
    threads: Annotated[str | None, _option("threads", "N[,N...]")] = None,
    batch: Annotated[str | None, _option("batch", "B[,B...]")] = None,
    experts_hit: Annotated[str | None, _option("experts-hit", "same|uniform")] = None,
    experts: Annotated[str | None, _option("experts", "N")] = None,
    bursts: Annotated[str | None, _option("bursts", "N")] = None,
    isa: Annotated[str | None, _option("isa", "NAME")] = None,
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
    from moechat.bench.kernel_command import run_kernels
    from moechat.bench.kernel_settings import KernelSettings

    texts = {
        "format": format_,
        "shape": shape,
        "threads": threads,
        "batch": batch,
        "experts-hit": experts_hit,
        "experts": experts,
        "bursts": bursts,
        "isa": isa,
    }
    run_kernels(KernelSettings.from_texts(texts), as_json=as_json, plot=plot)
    return 0
