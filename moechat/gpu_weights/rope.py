"""Rotary embedding of many tokens, or of rows of a step. Shapes: T of them, P pairs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch  # type: ignore[import-not-found, unused-ignore]
from numpy.typing import NDArray

from moechat.models.spec import Rope


@dataclass(frozen=True)
class Angles:
    """cos and sin of every token of a span, amplitude included: float32 [T, P]."""

    cos_TP: torch.Tensor
    sin_TP: torch.Tensor
    interleaved: bool

    def of(self, rows: slice) -> Angles:
        """Of some of the tokens."""
        return Angles(self.cos_TP[rows], self.sin_TP[rows], self.interleaved)


def cos_sin(
    rope: Rope, positions_T: NDArray[np.int64]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Of some positions, amplitude included: float32 [T, P].

    In float64 on the host, rounded once, as rope_angles of the native kernels has it.
    """
    frequencies_P = np.array(rope.inverse_frequencies, np.float32).astype(np.float64)
    radians_TP = positions_T.astype(np.float64)[:, None] * frequencies_P
    amplitude = np.float32(rope.amplitude)
    return (
        amplitude * np.cos(radians_TP).astype(np.float32),
        amplitude * np.sin(radians_TP).astype(np.float32),
    )


def angles(rope: Rope, first_position: int, num_tokens: int, device: torch.device) -> Angles:
    """Of positions from ``first_position`` on."""
    positions_T = np.arange(first_position, first_position + num_tokens)
    cos_TP, sin_TP = (torch.from_numpy(x).to(device) for x in cos_sin(rope, positions_T))
    return Angles(cos_TP, sin_TP, rope.interleaved)


def rotate(x_THd: torch.Tensor, by: Angles) -> None:
    """Rotates the first 2 P elements of every head [T, heads, d >= 2 P] in place.

    Pairs are (i, i + P), or (2 i, 2 i + 1) when interleaved.
    """
    pairs = by.cos_TP.shape[1]
    rotated = x_THd[..., : 2 * pairs]
    if by.interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated[..., :pairs], rotated[..., pairs:]
    cos, sin = by.cos_TP[:, None], by.sin_TP[:, None]
    turned = first * cos - second * sin
    second.copy_(first * sin + second * cos)
    first.copy_(turned)
