"""Rotary embedding of many tokens at once. Shapes: T tokens, P pairs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch  # type: ignore[import-not-found, unused-ignore]

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


def angles(rope: Rope, first_position: int, num_tokens: int, device: torch.device) -> Angles:
    """Of positions from ``first_position`` on.

    In float64 on the host, rounded once, as rope_angles of the native kernels has it.
    """
    frequencies_P = np.array(rope.inverse_frequencies, np.float32).astype(np.float64)
    positions_T = np.arange(first_position, first_position + num_tokens, dtype=np.float64)
    radians_TP = positions_T[:, None] * frequencies_P
    amplitude = np.float32(rope.amplitude)
    cos_TP, sin_TP = (
        torch.from_numpy(amplitude * function(radians_TP).astype(np.float32)).to(device)
        for function in (np.cos, np.sin)
    )
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
