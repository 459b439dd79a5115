"""``python -m moechat.bench kernels ...``: the same without the command line's libraries."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from moechat.bench.interrupt import EXIT_CODE
from moechat.bench.kernel_command import run_kernels
from moechat.bench.kernel_options import OPTIONS
from moechat.bench.kernel_settings import KernelSettings
from moechat.errors import MoechatError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (default: this process's) and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m moechat.bench")
    kernels = parser.add_subparsers(dest="command", required=True).add_parser(
        "kernels", help="speed of the experts' kernels over plain reading"
    )
    for name, (default, text) in OPTIONS.items():
        kernels.add_argument(f"--{name}", default=default, help=text)
    kernels.add_argument("--json", action="store_true", help="Print one JSON object.")
    kernels.add_argument("--plot", type=Path, metavar="FILE", help="Write a picture: .svg or .png.")
    arguments = parser.parse_args(argv)
    texts = {name: getattr(arguments, name.replace("-", "_")) for name in OPTIONS}
    try:
        settings = KernelSettings.from_texts(texts)
        run_kernels(settings, as_json=arguments.json, plot=arguments.plot)
    except KeyboardInterrupt:
        return EXIT_CODE
    except MoechatError as error:
        print(f"error: {error.message} [{error.name}]", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
