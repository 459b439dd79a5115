"""What ``moechat bench kernels`` can be told, and what of it makes sense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moechat import _native
from moechat.bench.kernel_options import FORMATS, HITS, OPTIONS
from moechat.errors import Usage

MIN_BURSTS = 5
MAX_BURSTS = 1000
MAX_THREADS = 256
MAX_BATCH = 4096
MAX_EXPERTS = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSettings:
    """One run; raises Usage for what makes no sense.

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
            _choice("--format", name, FORMATS)
        _choice("--experts-hit", self.experts_hit, HITS)
        _within("--threads", self.threads, 1, MAX_THREADS)
        _within("--batch", self.batches, 1, MAX_BATCH)
        _within("--bursts", (self.bursts,), MIN_BURSTS, MAX_BURSTS)
        if self.experts is not None:
            _within("--experts", (self.experts,), 1, MAX_EXPERTS)

    @classmethod
    def from_texts(cls, texts: dict[str, str | None]) -> KernelSettings:
        """From what stands on a command line, by the names of OPTIONS; None: the default."""
        given = {
            name: default if texts.get(name) is None else texts[name]
            for name, (default, _) in OPTIONS.items()
        }
        experts = given["experts"]
        return cls(
            formats=_names(given["format"] or ""),
            shape=given["shape"] or "",
            threads=_numbers("threads", given["threads"] or str(_native.available_cpus())),
            batches=_numbers("batch", given["batch"] or ""),
            experts_hit=given["experts-hit"] or "",
            experts=None if experts is None else _number("experts", experts),
            bursts=_number("bursts", given["bursts"] or ""),
            isa=given["isa"],
        )


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(item.strip() for item in text.split(",")))


def _numbers(option: str, text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_number(option, item) for item in text.split(",")))


def _number(option: str, text: str) -> int:
    digits = text.strip()
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 9):
        raise Usage(f"--{option} cannot be {text[:40]!a}", "it is a whole number")
    return int(digits)


def _choice(option: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise Usage(f"{option} cannot be {value[:40]!a}", f"it is one of {', '.join(known)}")


def _within(option: str, values: Sequence[int], low: int, high: int) -> None:
    for value in values:
        if not low <= value <= high:
            raise Usage(f"{option} cannot be {value}", f"allowed are {low} to {high}")
