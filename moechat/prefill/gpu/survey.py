"""What GPUs torch sees here, and how fast weights would come to each."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]

_cuda: Any = torch.cuda  # parts of it have no types
_COPIED_BYTES = 256 << 20
_PIECE_BYTES = 8 << 20  # as prefill copies
_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One GPU. ``link_bytes_per_second``: of copies from page-locked memory; None: not measured."""

    device: str
    name: str
    compute_capability: str
    memory_bytes: int
    free_bytes: int
    link_bytes_per_second: float | None


def survey() -> list[GpuFacts]:
    """All GPUs, those that fail without a rate; takes about a second each."""
    found = []
    for number in range(_cuda.device_count()):
        properties = _cuda.get_device_properties(number)
        free_bytes, rate = 0, None
        with contextlib.suppress(RuntimeError):
            free_bytes = _cuda.mem_get_info(number)[0]
            rate = link_bytes_per_second(f"cuda:{number}")
        found.append(
            GpuFacts(
                device=f"cuda:{number}",
                name=str(properties.name),
                compute_capability=f"{properties.major}.{properties.minor}",
                memory_bytes=int(properties.total_memory),
                free_bytes=int(free_bytes),
                link_bytes_per_second=rate,
            )
        )
    return found


def link_bytes_per_second(device: str) -> float:
    """The best of some copies from page-locked host memory, in pieces as prefill makes them."""
    host = torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device)
    best = 0.0
    with _cuda.device(device):
        stream = _cuda.Stream(device)
        for _ in range(_ROUNDS):
            begin, end = (_cuda.Event(enable_timing=True) for _ in range(2))
            with _cuda.stream(stream):
                begin.record(stream)
                for first in range(0, _COPIED_BYTES, _PIECE_BYTES):
                    piece = slice(first, first + _PIECE_BYTES)
                    target[piece].copy_(host[piece], non_blocking=True)
                end.record(stream)
            end.synchronize()
            best = max(best, _COPIED_BYTES / (begin.elapsed_time(end) / 1000))
    return best
