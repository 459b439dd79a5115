"""``moechat eval``: what a model gets right here, and what the KV path costs it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moechat.cli import device_options, options
from moechat.errors import Usage


def build_app() -> typer.Typer:
    """``moechat eval`` with its sub-commands."""
    app = typer.Typer(
        rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]}
    )
    app.callback(invoke_without_command=True)(evaluate)
    app.command("ppl")(ppl)
    app.command("needle")(needle)
    app.command("kv")(kv)
    app.command("probe")(probe)
    return app


def _text(name: str, metavar: str, help_text: str) -> Any:
    """A text that eval.settings reads."""
    return typer.Option(f"--{name}", metavar=metavar, help=help_text)


def _file(name: str, help_text: str) -> Any:
    return typer.Option(f"--{name}", metavar="FILE", help=help_text, show_default=False)


Window = Annotated[str, _text("window", "TOKENS", "Tokens that are read together.")]
Lengths = Annotated[
    str | None,
    typer.Option(
        "--lengths",
        metavar="TOKENS[,...]",
        help="Lengths of the texts that needles are hidden in. Default: 700,1400,2700,3400, as far "
        "as the context has room.",
        show_default=False,
    ),
]
Depths = Annotated[
    str, _text("depths", "N", "Places of the needle, evenly apart: 5, 10, ... 95 % for 19.")
]
Filler = Annotated[
    Path | None,
    _file(
        "filler",
        "Hide needles between the sentences of this text or these chats. Default: sentences that "
        "come with moechat.",
    ),
]
Seed = Annotated[str, _text("seed", "N", "Another seed draws other texts, names and codes.")]


def evaluate(ctx: typer.Context) -> None:
    """Measure what a model gets right here."""
    if ctx.invoked_subcommand is None:
        raise Usage(
            "it is not said what to measure",
            "there is no sub-command",
            "`moechat eval ppl mini notes.txt`, `moechat eval needle mini`, `moechat eval kv mini` "
            "or `moechat eval probe mini`",
        )


def ppl(
    model: options.RequiredModelArgument,
    file: Annotated[
        Path,
        typer.Argument(
            help="A text, or chats in .json: a list of lists of [user, reply]. Also packed: .xz.",
            metavar="FILE",
        ),
    ],
    window: Annotated[
        str | None,
        typer.Option(
            "--window",
            metavar="TOKENS",
            help="Tokens of a text that are read together. Default: 2048, as far as the context "
            "has room.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        str | None,
        typer.Option(
            "--limit",
            metavar="N",
            help="Only the first N windows or chats.",
            show_default=False,
        ),
    ] = None,
    threads: options.Threads = None,
    device: device_options.Device = "cpu",
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> int:
    """Perplexity of a model on a text.

    A text is read in windows, none of which knows the one before. The token after each one that is
    read counts: of every window as many as it has, and of the text all but its first. Of chats each
    is rendered by the model's template and read alone; all its tokens count but the first.

    \b
      moechat eval ppl mini notes.txt
      moechat eval ppl mini chats.json.xz --limit 100 --json
    """
    from moechat.eval.command import run_ppl
    from moechat.eval.settings import number

    return run_ppl(
        model,
        file,
        window=None if window is None else number("window", window),
        limit=None if limit is None else number("limit", limit),
        threads=threads,
        device=device,
        as_json=as_json,
    )


def needle(
    model: options.RequiredModelArgument,
    lengths: Lengths = None,
    depths: Depths = "19",
    filler: Filler = None,
    seed: Seed = "0",
    threads: options.Threads = None,
    device: device_options.Device = "cpu",
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> int:
    """Whether a model finds a fact in a long text.

    "The code of Clara is 48213." is hidden at different depths of texts of different lengths, and
    the code is asked for. Found means that the answer's first number is the code.

    \b
      moechat eval needle mini
      moechat eval needle mini --lengths 1000,4000 --depths 9 --filler book.txt
    """
    from moechat.eval.command import run_needle
    from moechat.eval.settings import NeedleSettings

    settings = NeedleSettings.from_texts(lengths, depths, filler, seed, least_depths=1)
    return run_needle(model, settings, threads=threads, device=device, as_json=as_json)


def kv(
    model: options.RequiredModelArgument,
    text: Annotated[
        Path | None,
        _file(
            "text",
            "Measure perplexity on this text or these chats, too. Also packed: .xz.",
        ),
    ] = None,
    policies: Annotated[
        str, _text("policies", "NAMES", "What to compare; native is always measured.")
    ] = "native,fp16,int8,int4,k8v4,spectrum,spectrum2,pdtrim,snapkv",
    budgets: Annotated[
        str,
        _text("budgets", "B[,B...]", "Bytes to send, as shares of 2 bytes an element."),
    ] = "0.5,0.3",
    window: Window = "2000",
    scored: Annotated[
        str, _text("scored", "TOKENS", "The last tokens of a window, which are predicted.")
    ] = "500",
    windows: Annotated[str, _text("windows", "N", "Windows of the text, at most.")] = "20",
    lengths: Lengths = None,
    depths: Depths = "19",
    filler: Filler = None,
    seed: Seed = "0",
    threads: options.Threads = None,
    device: device_options.Device = "cpu",
    plot: Annotated[
        Path | None,
        _file("plot", "Write a picture, quality over bytes: .svg or .png."),
    ] = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> int:
    """Quality and bytes of every way to send the KV cache.

    The first tokens of each window are prefilled and cross the KV path; the last ones are predicted
    from what arrived. Of a text with a needle everything before the question crosses.

    spectrum has three tiers of precision, spectrum2 two, spectrum4 four; these, pdtrim and snapkv
    are measured at every budget. int4-plain and int4-centred quantise keys as they are, or less
    each channel's mean; so with the other names.

    \b
      moechat eval kv mini
      moechat eval kv mini --text chats.json.xz --plot kv.svg
      moechat eval kv /path/model.gguf --text wiki.txt --window 2048 --scored 512 --windows 6
    """
    from moechat.eval.command import run_kv
    from moechat.eval.policies import policies_of
    from moechat.eval.settings import (
        NeedleSettings,
        ScoringSettings,
        budget_fractions,
        names_in,
    )

    needles = NeedleSettings.from_texts(lengths, depths, filler, seed)
    scoring = ScoringSettings.from_texts(text, window, scored, windows)
    chosen = policies_of(names_in(policies), budget_fractions(budgets))
    return run_kv(
        model, chosen, needles, scoring, threads=threads, device=device, as_json=as_json, plot=plot
    )


def probe(
    model: options.RequiredModelArgument,
    threads: options.Threads = None,
    device: device_options.Device = "cpu",
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> int:
    """Whether a model bears 4-bit KV.

    Three needles are to be found in texts that cross with nearly every token in INT4, and the
    logits are compared with those of native KV. That decides what `--kv spectrum` may do. The
    verdict is kept; `moechat show` tells it.

    \b
      moechat eval probe mini
      moechat eval probe /path/model.gguf --json
    """
    from moechat.eval.command import run_probe

    return run_probe(model, threads=threads, device=device, as_json=as_json)
