"""The codes of kernels/kv_codec/kv_codec.h in torch operations: rows to bytes and back, any device.

The same bytes as the native codec. Every operation is a torch call of its own, so that no product
and sum become one rounding; divisors lie on the device, since by one on the host CUDA multiplies
with its reciprocal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import torch  # type: ignore[import-not-found, unused-ignore]

from moechat.kv.layout import KVLayout
from moechat.kv.tiers import BITS, Code, Tier, coded_parts

_STEPS: dict[Code, float] = {"int8": 127.0, "int4": 8.0}
_LARGEST_HALF = 65504.0

# (sums float32 [C] of rows float32 [m, C], taken one row after the other; bool [], whether they
# surely are).
RowSum = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Run:
    """``count`` neighbouring parts of one width and code, all of them centred or none."""

    begin: int
    count: int
    width: int
    code: Code
    centred: bool

    @property
    def end(self) -> int:
        """One behind the last element."""
        return self.begin + self.count * self.width

    @property
    def payload_bytes(self) -> int:
        """Of a row."""
        return self.count * ((self.width * BITS[self.code] + 7) // 8)


@lru_cache(maxsize=64)
def runs_of(layout: KVLayout, tier: Tier, num_centred: int) -> tuple[Run, ...]:
    """The parts of a coded tier as runs, in order. ValueError as coded_parts."""
    parts = coded_parts(layout, tier)
    alike = groupby(parts, lambda p: (p[1], p[2], p[2] != "f16" and p[0] + p[1] <= num_centred))
    runs = []
    for (width, code, centred), group in alike:
        members = list(group)
        runs.append(Run(members[0][0], len(members), width, code, centred))
    return tuple(runs)


def encode_run(
    rows_mw: torch.Tensor, run: Run, centre: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(payload uint8 [m, bytes], scales float16 [m, parts] if any, bad bool [m]) of float32 rows.

    What a bad row's bytes are means nothing.
    """
    shape = (len(rows_mw), run.count, run.width)
    values = rows_mw[:, run.begin : run.end].reshape(shape)
    if run.centred:
        values = values - centre[run.begin : run.end].reshape(shape[1:])
    largest = values.abs().amax(2)
    if run.code == "f16":
        halves = values.to(torch.float16).reshape(len(rows_mw), -1)
        return halves.view(torch.uint8), None, ~(largest <= _LARGEST_HALF).all(1)

    wanted = largest / largest.new_full((), _STEPS[run.code])
    nearest = wanted.to(torch.float16)
    below = (nearest.float() < wanted) | ((nearest == 0) & (largest > 0))
    scales = (nearest.view(torch.int16) + below).view(torch.float16)
    bad = ~torch.isfinite(scales).all(1)
    if run.code == "int4":
        scales = torch.where(values.amin(2) == -largest, scales, -scales)
    inverse = torch.where(scales == 0, 0.0, scales.float().reciprocal())
    codes = (values * inverse[:, :, None]).round()
    if run.code == "int8":
        payload = codes.to(torch.int8).view(torch.uint8)
    else:
        nibbles = (codes + 8).clamp(max=15).to(torch.uint8)
        second = (run.width + 1) // 2
        high = torch.nn.functional.pad(nibbles[:, :, second:], (0, run.width % 2), value=8)
        payload = nibbles[:, :, :second] | high << 4
    return payload.reshape(len(rows_mw), -1), scales, bad


def decode_rows(
    payload: torch.Tensor,
    scales: torch.Tensor | None,
    runs: Sequence[Run],
    centre: torch.Tensor,
) -> torch.Tensor:
    """float32 rows [m, W] of one coded tier; not finite where scales or values are not."""
    columns = []
    offset_bytes = first_scale = 0
    for run in runs:
        shape = (len(payload), run.count, -1)
        # A copy, since its float16 values may lie at odd bytes.
        coded = payload[:, offset_bytes : offset_bytes + run.payload_bytes].clone(
            memory_format=torch.contiguous_format
        )
        offset_bytes += run.payload_bytes
        if run.code == "f16":
            columns.append(coded.view(torch.float16).float())
            continue
        coded = coded.reshape(shape)
        if run.code == "int8":
            codes = coded.view(torch.int8).float()
        else:
            codes = torch.cat([coded & 15, coded >> 4], 2)[:, :, : run.width].float() - 8
        assert scales is not None  # verify() saw them
        values = codes * scales[:, first_scale : first_scale + run.count, None].float()
        first_scale += run.count
        if run.centred:
            values = values + centre[run.begin : run.end].reshape(shape[1:])
        columns.append(values.reshape(len(payload), -1))
    return torch.cat(columns, 1)


def summations(device: torch.device) -> tuple[RowSum, ...]:
    """Ways to sum rows in order; each next one for what the one before was not sure of."""
    return (_sum_one_by_one,) if device.type == "cpu" else (_sum_by_scan, _sum_one_by_one)


def _sum_one_by_one(rows_mc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An operation a row."""
    total = torch.zeros_like(rows_mc[0])
    for row in rows_mc:
        total += row
    return total, torch.ones((), dtype=torch.bool, device=rows_mc.device)


def _sum_by_scan(rows_mc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One scan over the rows, and its own check.

    CUDA scans the outer dimension in order, but nobody promises that. If every sum is the one
    before plus a row, all are.
    """
    totals = rows_mc.cumsum(0)
    steps = torch.nn.functional.pad(totals[:-1], (0, 0, 1, 0)) + rows_mc
    # A sum from zero on is never -0.
    return totals[-1] + 0.0, (totals == steps).all()
