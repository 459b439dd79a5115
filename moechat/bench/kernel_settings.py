"""What ``moechat bench kernels`` can be told, and what of it makes sense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moechat.bench.routing import HITS
from moechat.bench.stored_matrix import FORMATS
from moechat.errors import Usage

DEFAULT_FORMATS = ("fp8", "int4", "mxfp4", "bf16")
DEFAULT_SHAPE = "deepseek-v3"
DEFAULT_BURSTS = 7
MIN_BURSTS = 5
MAX_BATCH = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSettings:
    """One run. ``threads`` and ``batches`` are measured in every combination, taking turns.

    ``experts`` None: enough that no cache holds them. ``isa`` None: the one in use.
    """

    formats: tuple[str, ...] = DEFAULT_FORMATS
    shape: str = DEFAULT_SHAPE
    threads: tuple[int, ...]
    batches: tuple[int, ...] = (1,)
    experts_hit: str = "same"
    experts: int | None = None
    bursts: int = DEFAULT_BURSTS
    burst_seconds: float = 0.25
    isa: str | None = None

    def __post_init__(self) -> None:
        if not self.formats:
            raise Usage("no format is given", "", f"One of {', '.join(FORMATS)}")
        for name in self.formats:
            _choice("--format", name, FORMATS)
        _choice("--experts-hit", self.experts_hit, HITS)
        _within("--threads", self.threads, 1, 256)
        _within("--batch", self.batches, 1, MAX_BATCH)
        _within("--bursts", (self.bursts,), MIN_BURSTS, 1000)
        if self.experts is not None:
            _within("--experts", (self.experts,), 1, 65536)


def parse_list(option: str, text: str) -> tuple[int, ...]:
    """ "1,2,8" as whole numbers, each once. Raises Usage that names the option."""
    values = []
    for item in text.split(","):
        if not item.strip().isdecimal():
            raise Usage(f"{option} cannot be {text[:40]!a}", "", "Give whole numbers: 2 or 1,2,8")
        values.append(int(item))
    return tuple(dict.fromkeys(values))


def parse_names(text: str) -> tuple[str, ...]:
    """ "fp8,int4" as names, each once."""
    return tuple(dict.fromkeys(item.strip() for item in text.split(",")))


def _choice(option: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise Usage(f"{option} cannot be {value[:40]!a}", f"it is one of {', '.join(known)}")


def _within(option: str, values: Sequence[int], low: int, high: int) -> None:
    for value in values:
        if not low <= value <= high:
            raise Usage(f"{option} cannot be {value}", f"allowed are {low} to {high}")
