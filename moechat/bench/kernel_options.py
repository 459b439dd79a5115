"""The options of ``bench kernels``: defaults and help, for both command lines. Imports nothing."""

from __future__ import annotations

from typing import get_args

from moechat.models.spec import Format

FORMATS: tuple[str, ...] = get_args(Format)
HITS = ("same", "uniform")

# Default and help by name. Values are texts: "1,2,8" is a list.
OPTIONS: dict[str, tuple[str | None, str]] = {
    "format": ("fp8,int4,mxfp4,bf16", f"Weight formats, of: {', '.join(FORMATS)}."),
    "shape": ("deepseek-v3", "The model whose experts' dimensions are taken; no weights needed."),
    "threads": (None, "Compute threads, also several: 1,2,8. Default: the usable processors."),
    "batch": ("1", "Rows (tokens) a call, also several: 1,8."),
    "experts-hit": ("same", "same: all rows use the same experts; uniform: each row its own."),
    "experts": (None, "Experts to rotate over. Default: 64, more if the caches could hold them."),
    "bursts": ("7", "Bursts a figure is the median of, 5 or more."),
    "isa": (None, "Force an instruction set. Default: the one that moechat uses here."),
}
