"""``python -m moechat.bench kernels ...``: the same without the command line's libraries."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from moechat import _native
from moechat.bench.kernel_settings import (
    DEFAULT_BURSTS, DEFAULT_FORMATS, DEFAULT_SHAPE, KernelSettings, parse_list, parse_names,
)
from moechat.bench.kernels import measure_kernels


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m moechat.bench")
    sub = parser.add_subparsers(dest="command", required=True)
    k = sub.add_parser("kernels")
    k.add_argument("--format", default=",".join(DEFAULT_FORMATS))
    k.add_argument("--shape", default=DEFAULT_SHAPE)
    k.add_argument("--threads", default=str(_native.available_cpus()))
    k.add_argument("--batch", default="1")
    k.add_argument("--experts-hit", default="same")
    k.add_argument("--experts", type=int)
    k.add_argument("--bursts", type=int, default=DEFAULT_BURSTS)
    k.add_argument("--isa")
    k.add_argument("--json", action="store_true")
    a = parser.parse_args(argv)
    settings = KernelSettings(formats=parse_names(a.format), shape=a.shape, threads=parse_list("--threads", a.threads),
        batches=parse_list("--batch", a.batch), experts_hit=a.experts_hit, experts=a.experts, bursts=a.bursts, isa=a.isa)
    print(json.dumps(measure_kernels(settings, lambda line: None), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
