"""Room on a device for some routed experts of a layer, at addresses that never change.

Shapes: H experts held, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch  # type: ignore[import-not-found, unused-ignore]
from numpy.typing import NDArray

from moechat.decode.gpu.host_pieces import HostPieces, bytes_of
from moechat.errors import BadParameter
from moechat.gpu_weights.decode import decode, is_view, scale_grid, stays_stored
from moechat.gpu_weights.stored import ExpertStack, Layout, StoredMatrix
from moechat.gpu_weights.weight import Fp8Matrix, Weight

_TILE_INPUTS = 128  # of the kernels
_PARTS = ("gate", "up", "down")


class ExpertSlots:
    """``gate`` and ``up`` [H, I, D], ``down`` [H, D, I]; nothing is in them at first.

    FP8 stays codes and scales where products round their inputs; other formats are decoded.
    """

    def __init__(
        self, stack: ExpertStack, count: int, *, device: torch.device, compute: str
    ) -> None:
        self._stack = stack
        self._parts = {
            name: _Part(layout, count, device, dtype, codes)
            for name, layout, dtype, codes in _kinds(stack, compute)
        }
        self.gate, self.up, self.down = (part.weight for part in self._parts.values())

    def fill(self, slot: int, expert: int, pieces: HostPieces) -> Iterator[None]:
        """Copy an expert to a slot; a stop after each piece. Complete when it ends."""
        for name, part in self._parts.items():
            yield from part.fill(slot, self._stack.parts[name][expert], pieces)


def check_holdable(stack: ExpertStack) -> None:
    """BadParameter where experts have biases, lie interleaved, or differ in how they are stored."""
    why = ""
    if stack.biases or "gate" not in stack.parts:
        why = "they have biases, or gate and up are one matrix"
    else:
        gate, up, down = (stack.parts[name][0].layout for name in _PARTS)
        if (gate.format, gate.block) != (up.format, up.block) or gate.format != down.format:
            why = "their matrices are stored in different ways"
    if why:
        raise BadParameter(
            "experts of this model cannot be held on the GPU", why, "Leave out --gpu-experts"
        )


def expert_bytes(stack: ExpertStack, compute: str) -> int:
    """On the device, of one expert."""
    return sum(
        layout.rows * layout.cols * (1 if codes else dtype.itemsize)
        + (4 * layout.grid[0] * layout.grid[1] if codes else 0)
        for _, layout, dtype, codes in _kinds(stack, compute)
    )


def _kinds(stack: ExpertStack, compute: str) -> Iterator[tuple[str, Layout, torch.dtype, bool]]:
    """Of each part its name, and how it is stored and held: decoded to a type, or as FP8 codes."""
    layouts = {name: stack.parts[name][0].layout for name in _PARTS}
    dtypes = {
        name: torch.float32
        if compute == "exact" or layout.format in ("f32", "f16")
        else torch.bfloat16
        for name, layout in layouts.items()
    }
    codes = all(  # the kernels scale whole tiles, and know one kind of weight
        layout.format == "fp8"
        and stays_stored(layout, dtypes[name])
        and layout.block[1] % _TILE_INPUTS == 0
        for name, layout in layouts.items()
    )
    for name, layout in layouts.items():
        yield name, layout, dtypes[name], codes


class _Part:
    """One of an expert's matrices, of all that are held."""

    def __init__(
        self, layout: Layout, count: int, device: torch.device, dtype: torch.dtype, codes: bool
    ) -> None:
        self._layout, self._device, self._dtype = layout, device, dtype
        shape = (count, layout.outputs, layout.inputs)
        self.weight: Weight
        if codes:
            self.weight = Fp8Matrix(
                torch.empty(shape, dtype=torch.uint8, device=device),
                torch.empty((count, *layout.grid), device=device),
                layout.block,
            )
        else:
            self.weight = torch.empty(shape, dtype=dtype, device=device)

    def fill(self, slot: int, matrix: StoredMatrix, pieces: HostPieces) -> Iterator[None]:
        weight, layout = self.weight, self._layout
        if isinstance(weight, Fp8Matrix):
            assert matrix.scale is not None
            grid = scale_grid(layout, torch.from_numpy(np.array(matrix.scale)[None]))
            yield from pieces.copy(bytes_of(weight.codes[slot]), matrix.data)
            yield from pieces.copy(bytes_of(weight.scale[slot]), bytes_of(grid).numpy())
        elif is_view(layout, self._dtype) and not layout.transposed:
            yield from pieces.copy(bytes_of(weight[slot]), matrix.data)
        else:
            data, scale = self._room(matrix.data), None
            yield from pieces.copy(data, matrix.data)
            if matrix.scale is not None:
                scale = self._room(matrix.scale)
                yield from pieces.copy(scale, matrix.scale)
                scale = scale[None]
            weight[slot].copy_(decode(layout, data[None], scale, self._dtype)[0])
            yield

    def _room(self, source: NDArray[np.uint8]) -> torch.Tensor:
        return torch.empty(len(source), dtype=torch.uint8, device=self._device)
