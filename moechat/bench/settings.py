"""What ``moechat bench`` can be told, for both of its command lines, and what of it makes sense.

Values are texts as they stand on a command line: "1,2,8" is a list.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moechat import _native
from moechat.errors import ModelNotFound, Usage
from moechat.registry import load_registry

# Of expert weights: safetensors' formats, then those of GGUF files.
FORMATS = (
    *("fp8", "int4", "mxfp4", "bf16"),
    *("q8_0", "q4_0", "q5_0", "q4_k", "q5_k", "q6_k", "mxfp4_block"),
)
SYNTHETIC_FORMATS = ("fp8", "int4", "bf16", "mxfp4")
ISAS = ("amx", "avx512bf16", "avx512", "avx2", "ref")
HITS = ("same", "uniform")
MIN_BURSTS = 5
# Least and greatest values, by option.
RANGES = {
    "threads": (1, 256),
    "batch": (1, 4096),
    "bursts": (MIN_BURSTS, 1000),
    "experts": (1, 65536),
    "repetitions": (1, 1000),
    "max-context": (1, 1 << 24),
    "layers": (1, 1000),
}

# Default and help by name.
Options = dict[str, tuple[str | None, str]]
KERNEL_OPTIONS: Options = {
    "format": (
        "fp8,int4,mxfp4,bf16",
        f"Weight formats, of: {', '.join(FORMATS)}. The last is GGUF's MXFP4.",
    ),
    "shape": ("deepseek-v3", "The model whose experts' dimensions are taken; no weights needed."),
    "threads": (None, "Compute threads, also several: 1,2,8. Default: the usable processors."),
    "batch": ("1", "Rows (tokens) a call, also several: 1,8."),
    "experts-hit": ("same", "same: all rows use the same experts; uniform: each row its own."),
    "experts": (None, "Experts to rotate over. Default: 64, more if the caches could hold them."),
    "bursts": ("7", f"Bursts a figure is the median of, {MIN_BURSTS} or more."),
    "isa": (None, "Force an instruction set. Default: the one that moechat uses here."),
}
MODEL_OPTIONS: Options = {
    "threads": (None, "Compute threads. Default: the usable processors."),
    "repetitions": ("5", "Bursts a figure is the median of."),
    "max-context": (
        "4096",
        "Prompts and contexts grow fourfold up to so many tokens; prompts end earlier where the "
        "next would take too long.",
    ),
}
DEVICE_OPTIONS: Options = {
    "device": (
        "cpu",
        "What reads all prompts: cpu; cuda; cuda:1; cuda:0,cuda:1; cuda:all; or auto, as for run.",
    ),
}
CUT_OPTIONS: Options = {
    "layers": (None, "Layers with experts to build. Default: what fits in memory."),
    "experts": (None, "Experts to build in a layer. Default: all, or what fits in memory."),
    "format": (
        None,
        f"Every linear layer in one of: {', '.join(SYNTHETIC_FORMATS)}. Default: the model's own.",
    ),
}

Texts = Mapping[str, "str | None"]  # by the names above; None is the default


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSettings:
    """One run of ``bench kernels``; raises Usage for what makes no sense.

    ``threads`` and ``batches`` are measured in every combination, taking turns. ``experts`` None:
    enough that no cache holds them. ``isa`` None: the one in use.
    """

    formats: tuple[str, ...]
    shape: str
    threads: tuple[int, ...]
    batches: tuple[int, ...] = (1,)
    experts_hit: str = "same"
    experts: int | None = None
    bursts: int = 7
    burst_seconds: float = 0.2
    isa: str | None = None

    def __post_init__(self) -> None:
        for name in self.formats:
            _choice("format", name, FORMATS)
        _choice("experts-hit", self.experts_hit, HITS)
        if self.isa is not None:
            _choice("isa", self.isa, ISAS)
        _within("threads", self.threads)
        _within("batch", self.batches)
        _within("bursts", (self.bursts,))
        _within("experts", (self.experts,))

    @classmethod
    def from_texts(cls, texts: Texts) -> KernelSettings:
        """From what stands on a command line."""
        given = _with_defaults(texts, KERNEL_OPTIONS)
        experts = given["experts"]
        return cls(
            formats=tuple(dict.fromkeys(name.strip() for name in given["format"].split(","))),
            shape=given["shape"],
            threads=_numbers("threads", given["threads"] or str(_native.available_cpus())),
            batches=_numbers("batch", given["batch"]),
            experts_hit=given["experts-hit"],
            experts=_number("experts", experts) if experts else None,
            bursts=_number("bursts", given["bursts"]),
            isa=given["isa"] or None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """One run of ``bench model`` or ``--synthetic``; raises Usage for what makes no sense.

    ``max_context`` bounds prompts and contexts; ``device`` reads the prompts of ``bench model``.
    Of the synthetic model to build are ``layers`` (those with experts), ``experts`` and ``format``;
    None is what fits, or the model's own.
    """

    threads: int | None = None
    repetitions: int = 5
    max_context: int = 4096
    device: str = "cpu"
    layers: int | None = None
    experts: int | None = None
    format: str | None = None

    def __post_init__(self) -> None:
        _within("threads", (self.threads,))
        _within("repetitions", (self.repetitions,))
        _within("max-context", (self.max_context,))
        _within("layers", (self.layers,))
        _within("experts", (self.experts,))
        if self.format is not None:
            _choice("format", self.format, SYNTHETIC_FORMATS)

    @classmethod
    def from_texts(cls, texts: Texts) -> ModelSettings:
        """From what stands on a command line."""
        given = _with_defaults(texts, MODEL_OPTIONS | DEVICE_OPTIONS | CUT_OPTIONS)
        numbers = {
            name.replace("-", "_"): _number(name, text)
            for name, text in given.items()
            if name not in ("format", "device") and text
        }
        return cls(format=given["format"] or None, device=given["device"], **numbers)


def model_entry(name: str) -> dict[str, Any]:
    """The table of a model whose shapes are wanted, in models.toml. Raises ModelNotFound."""
    entries = load_registry().entries
    if name not in entries:
        close = difflib.get_close_matches(name[:60].lower(), entries, n=3)
        known = f"known names: {', '.join(entries)}"
        raise ModelNotFound(
            f"no model is called {name[:60]!a}",
            f"did you mean {' or '.join(close)}? {known}" if close else known,
            "`moechat list` shows them",
        )
    return entries[name]


def _with_defaults(texts: Texts, options: Options) -> dict[str, str]:
    """Of every option what was given, or the default, or ""."""
    given = {name: texts.get(name) for name in options}
    for name, text in given.items():
        if text == "":
            raise Usage(f"--{name} cannot be empty", options[name][1].removesuffix("."))
    return {name: text or options[name][0] or "" for name, text in given.items()}


def _numbers(option: str, text: str) -> tuple[int, ...]:
    items = text.split(",")
    if not all(item.strip() for item in items):
        raise Usage(f"--{option} cannot be {text[:40]!a}", "a number is missing beside a comma")
    return tuple(dict.fromkeys(_number(option, item) for item in items))


def _number(option: str, text: str) -> int:
    digits = text.strip()
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 9):
        raise _out_of_range(option, ascii(text[:40]))
    return int(digits)


def _choice(option: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise Usage(f"--{option} cannot be {value[:40]!a}", f"it is one of {', '.join(known)}")


def _within(option: str, values: Sequence[int | None]) -> None:
    low, high = RANGES[option]
    for value in values:
        if value is not None and not low <= value <= high:
            raise _out_of_range(option, str(value))


def _out_of_range(option: str, shown_value: str) -> Usage:
    low, high = RANGES[option]
    return Usage(
        f"--{option} cannot be {shown_value}", f"it is a whole number from {low} to {high}"
    )
