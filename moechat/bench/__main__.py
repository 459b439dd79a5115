"""``python -m moechat.bench``: ``moechat bench`` without the libraries of that command line.

python -m moechat.bench kernels --format fp8 --json
python -m moechat.bench model mini
python -m moechat.bench --synthetic deepseek-v3
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from moechat.bench.command import EXIT_CODE, run_kernels, run_model, run_synthetic
from moechat.bench.settings import (
    CUT_OPTIONS,
    KERNEL_OPTIONS,
    MODEL_OPTIONS,
    KernelSettings,
    ModelSettings,
    Options,
)
from moechat.errors import MoechatError, system_error_text
from moechat.lost_signals import keep_lost_signals


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (default: this process's) and return the exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.synthetic is not None and arguments.command is not None:
        parser.error(f"--synthetic and `{arguments.command}` exclude each other")
    texts = {name.replace("_", "-"): text for name, text in vars(arguments).items()}
    output = {"as_json": arguments.json, "plot": arguments.plot}
    try:
        if arguments.command == "kernels":
            run_kernels(KernelSettings.from_texts(texts), **output)
        elif arguments.command == "model":
            run_model(arguments.model, ModelSettings.from_texts(texts), **output)
        else:
            run_synthetic(arguments.synthetic, ModelSettings.from_texts(texts), **output)
    except KeyboardInterrupt:
        return EXIT_CODE
    except MoechatError as error:
        print(f"error: {error.message} [{error.name}]", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        _abandon_stdout()
        return 1
    except OSError as error:
        print(f"error: {system_error_text(error)} [os-error]", file=sys.stderr)
        _abandon_stdout()
        return 1
    return 0


def _abandon_stdout() -> None:
    """Python flushes stdout at exit, and would complain once more."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m moechat.bench")
    parser.add_argument("--synthetic", metavar="NAME", help="NAME's shapes, random weights")
    _add(parser, MODEL_OPTIONS | CUT_OPTIONS)
    commands = parser.add_subparsers(dest="command")
    kernels = commands.add_parser("kernels", help="speed of the experts' kernels over reading")
    _add(kernels, KERNEL_OPTIONS)
    model = commands.add_parser("model", help="prefill and decode of a whole model")
    model.add_argument("model", help="a name, a folder or a GGUF file")
    _add(model, MODEL_OPTIONS)
    return parser


def _add(parser: argparse.ArgumentParser, options: Options) -> None:
    for name, (default, text) in options.items():
        parser.add_argument(f"--{name}", help=f"{text} Default: {default}." if default else text)
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="Write a picture: .svg or .png.")


if __name__ == "__main__":
    keep_lost_signals()
    sys.exit(main())
