"""The work itself, as worker processes do it: read, decode, encode, write in place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moechat.quantize.decode import Reader, cannot_quantise
from moechat.quantize.float_codes import bf16_is_finite, bf16_to_f32, f32_to_bf16
from moechat.quantize.fp8 import BLOCK, encode_fp8, squares
from moechat.quantize.int4 import encode_int4
from moechat.quantize.plan import LayerPlan, Plan, Task
from moechat.quantize.target import part_path, write_at

_KEPT_BYTES = 30 << 20


class Squares(NamedTuple):
    """Sums over some weights: of squared differences to the source, and of squares."""

    error: float
    total: float


class Piece(NamedTuple):
    """Bytes at a position of the file that the layer's outputs go to."""

    position: int
    content: NDArray[Any]


class Encoder:
    """What the tasks of a plan write, without writing it."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._reader = Reader()

    def close(self) -> None:
        """Close the source's files."""
        self._reader.close()

    def __call__(self, task: Task) -> tuple[list[Piece], Squares]:
        """The pieces of one task. Raises CheckpointDamaged for the source."""
        plan = self._plan.layers[task.layer_index]
        if task.part is not None:
            return self._copy(plan, task.part, task.begin, task.end)
        values_rc = self._reader.values(plan.layer, task.begin, task.end)
        if plan.action == "int4":
            int4 = encode_int4(values_rc)
            pieces = [
                _rows(plan, 0, task.begin, int4.packed),
                _rows(plan, 1, task.begin, int4.scale),
                *_shape(plan, task.begin),
            ]
            return pieces, Squares(int4.squared_error, int4.squared_sum)
        if plan.action == "fp8":
            fp8 = encode_fp8(values_rc)
            pieces = [
                _rows(plan, 0, task.begin, fp8.codes),
                _rows(plan, 1, task.begin // BLOCK, fp8.scale),
            ]
            return pieces, Squares(fp8.squared_error, fp8.squared_sum)
        codes = f32_to_bf16(values_rc)
        if not bf16_is_finite(codes):
            raise cannot_quantise(plan.layer.weight, "values that are too large for BF16")
        error = squares(bf16_to_f32(codes) - values_rc)
        return [_rows(plan, 0, task.begin, codes)], Squares(error, squares(values_rc))

    def _copy(
        self, plan: LayerPlan, part: int, begin: int, end: int
    ) -> tuple[list[Piece], Squares]:
        tensor = plan.layer.weight if part == 0 or plan.layer.scale is None else plan.layer.scale
        content = self._reader.raw(tensor, begin, end)
        pieces = [Piece(plan.outputs[part].begin_byte + begin, content)]
        if part == 0:
            pieces += _shape(plan, begin)
        return pieces, Squares(0.0, 0.0)


class Converter:
    """Carries out tasks of a plan; the files of ``folder`` exist under their temporary names."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan = plan
        self._folder = folder
        self._encode = Encoder(plan)
        self._file: tuple[int, int] | None = None  # shard, descriptor: one open at a time
        # An array is freed to the system, and the next one costs page faults again, unless a
        # larger one was freed before (glibc's mallopt page, M_MMAP_THRESHOLD). Never touched.
        np.empty(_KEPT_BYTES, np.uint8)

    def __call__(self, task: Task) -> Squares:
        """Do one task; everything it writes is in the file when this returns.

        Raises CheckpointDamaged for the source, DoesNotFit or MoechatError for the target.
        """
        pieces, result = self._encode(task)
        for piece in pieces:
            self._write(self._plan.layers[task.layer_index].shard, piece)
        return result

    def _write(self, shard: int, piece: Piece) -> None:
        path = part_path(self._folder, self._plan.shards[shard].name)
        if self._file is None or self._file[0] != shard:
            if self._file is not None:
                os.close(self._file[1])
                self._file = None
            self._file = (shard, os.open(path, os.O_WRONLY | os.O_CLOEXEC))
        write_at(self._file[1], path, piece.position, piece.content.data.cast("B"))


def _rows(plan: LayerPlan, part: int, first: int, rows: NDArray[Any]) -> Piece:
    """Rows of an output from ``first`` on."""
    row_bytes = rows.shape[1] * rows.itemsize
    return Piece(plan.outputs[part].begin_byte + first * row_bytes, rows)


def _shape(plan: LayerPlan, begin: int) -> list[Piece]:
    """With the first piece of an INT4 layer, the tensor that holds its shape."""
    if begin != 0 or len(plan.outputs) != 3:
        return []
    return [Piece(plan.outputs[2].begin_byte, np.array(plan.layer.shape, np.int64))]
