"""What the host tells a step: two buffers of fixed places, so that a captured graph finds them.

Shapes: R rows in use of MAX_ROWS, D hidden, L layers, P rotated pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch  # type: ignore[import-not-found, unused-ignore]
from numpy.typing import NDArray

from moechat.gpu_weights.host_read import from_host
from moechat.gpu_weights.rope import cos_sin
from moechat.models.spec import ModelSpec

MAX_ROWS = 16


@dataclass(frozen=True)
class RowInput:
    """One token: where its session's slots are in every layer (int32 [L])."""

    position: int
    slab: int
    begin_L: NDArray[np.int32]
    own_L: NDArray[np.int32]


class StepInputs:
    """``x`` float32 [MAX_ROWS, D]; ``angles[rope]`` cos and sin [MAX_ROWS, P]; ``slab``
    [MAX_ROWS], ``begin`` and ``own`` int32 [L, MAX_ROWS]; ``count`` int32 [1]: all on the device.
    """

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self._spec, layers = spec, spec.num_layers
        pairs = [len(rope.inverse_frequencies) for rope in spec.ropes]
        widths = [spec.hidden_size, *(width for n in pairs for width in (n, n))]
        pinned = device.type == "cuda"
        floats, ints = MAX_ROWS * sum(widths), MAX_ROWS * (1 + 2 * layers) + 1
        self._host_floats = torch.zeros(floats, pin_memory=pinned)
        self._host_ints = torch.zeros(ints, dtype=torch.int32, pin_memory=pinned)
        self._floats = self._host_floats.to(device, copy=True)
        self._ints = self._host_ints.to(device, copy=True)
        self._parts = _parts(self._floats, widths)
        self.x, *angles = self._parts
        self.angles = list(zip(angles[0::2], angles[1::2]))
        self.slab, self.begin, self.own, self.count = _places(self._ints, layers)
        self._host_parts = _parts(self._host_floats, widths)
        host_x, *host_angles = self._host_parts
        self._host_x = host_x.numpy()
        self._host_angles = [part.numpy() for part in host_angles]
        self._host_places = [part.numpy() for part in _places(self._host_ints, layers)]

    def set(self, x_RD: NDArray[np.float32], rows: Sequence[RowInput]) -> None:
        """In host memory; rows beyond are of nobody: slab 0, one slot each."""
        count = len(rows)
        self._host_x[:] = 0
        self._host_x[:count] = x_RD
        slab, begin, own, number = self._host_places
        for part in (slab, begin, own):
            part[:] = 0
        number[0] = count
        for r, row in enumerate(rows):
            slab[r], begin[:, r], own[:, r] = row.slab, row.begin_L, row.own_L
        positions = np.array([row.position for row in rows])
        for number_of, rope in enumerate(self._spec.ropes):
            cos, sin = self._host_angles[2 * number_of : 2 * number_of + 2]
            cos[:count], sin[:count] = cos_sin(rope, positions)

    def fetch(self, rows: int) -> None:
        """The first rows, to the device: a part of the step, on the current stream."""
        for there, here in zip(self._parts, self._host_parts):
            from_host(there[:rows], here[:rows])
        from_host(self._ints, self._host_ints)


def _parts(flat: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]:
    sizes = [MAX_ROWS * width for width in widths]
    return [part.view(MAX_ROWS, -1) for part in flat.split(sizes)]  # type: ignore[no-untyped-call, unused-ignore]


def _places(flat: torch.Tensor, layers: int) -> list[torch.Tensor]:
    slab, begin, own, count = flat.split([MAX_ROWS, layers * MAX_ROWS, layers * MAX_ROWS, 1])  # type: ignore[no-untyped-call, unused-ignore]
    return [slab, begin.view(layers, MAX_ROWS), own.view(layers, MAX_ROWS), count]
