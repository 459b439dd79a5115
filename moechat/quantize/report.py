"""What a job did, by kind of tensor: counts, bytes, and the error that rounding brought in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from moechat.quantize.journal import Record
from moechat.quantize.kinds import KINDS, kind_of
from moechat.quantize.plan import Plan


@dataclass(slots=True)
class KindReport:
    """All tensors of one kind.

    ``relative_rms_error``: root of the summed squared differences over the root of the summed
    squares, of the tensors that were written anew; None when all were copied. ``worst_tensor`` is
    the one for which it is largest.
    """

    kind: str
    num_tensors: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    relative_rms_error: float | None = None
    worst_tensor: str | None = None
    worst_relative_rms_error: float | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """A finished job. ``left``: matrices that only their shape kept from being quantised.

    ``read_bytes`` were read in the ``seconds`` of this run, perhaps the last of several.
    """

    to: str
    kinds: list[KindReport]
    left: list[str]
    bytes_before: int
    bytes_after: int
    num_files: int
    read_bytes: int
    seconds: float
    resumed: bool

    def as_json(self) -> dict[str, Any]:
        """As an object for --json, units in the keys."""
        rate = self.read_bytes / 1e6 / self.seconds if self.seconds > 0 else 0.0
        return {
            "to": self.to,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "weight_files": self.num_files,
            "resumed": self.resumed,
            "seconds": round(self.seconds, 3),
            "bytes_read": self.read_bytes,
            "read_mb_per_second": round(rate, 1),
            "kinds": [
                {
                    "kind": row.kind,
                    "tensors": row.num_tensors,
                    "bytes_before": row.bytes_before,
                    "bytes_after": row.bytes_after,
                    "relative_rms_error": row.relative_rms_error,
                    "worst_tensor": row.worst_tensor,
                    "worst_relative_rms_error": row.worst_relative_rms_error,
                }
                for row in self.kinds
            ],
            "not_quantised": self.left,
        }


def report_kinds(plan: Plan, records: dict[int, Record]) -> list[KindReport]:
    """The rows of a report, in the order of ``KINDS``; ``records`` has every layer."""
    rows = {kind: KindReport(kind) for kind in KINDS}
    squares: dict[str, list[Record]] = {kind: [] for kind in KINDS}
    for index, layer in enumerate(plan.layers):
        row = rows[kind_of(layer.layer.name)]
        row.num_tensors += 1
        row.bytes_before += layer.layer.stored_bytes
        row.bytes_after += layer.written_bytes
        record = records.get(index)
        if layer.action == "copy" or record is None:
            continue
        squares[row.kind].append(record)
        error = _relative(record.squared_error, record.squared_sum)
        if row.worst_relative_rms_error is None or error > row.worst_relative_rms_error:
            row.worst_relative_rms_error, row.worst_tensor = error, layer.layer.name
    for kind, found in squares.items():
        if found:
            rows[kind].relative_rms_error = _relative(
                math.fsum(record.squared_error for record in found),
                math.fsum(record.squared_sum for record in found),
            )
    return [row for row in rows.values() if row.num_tensors]


def _relative(squared_error: float, squared_sum: float) -> float:
    return math.sqrt(squared_error / squared_sum) if squared_sum > 0 else 0.0
