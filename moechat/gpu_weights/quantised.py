"""Inputs as e4m3 codes with a scale a row and 128 of them: mode "w8a8", never the default.

DeepSeek-V3's way of computing (technical report, section 3.3.2): scale = largest magnitude / 448.
Shapes: R rows, K inputs, G groups of 128 inputs, the last perhaps shorter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch  # type: ignore[import-not-found, unused-ignore]

GROUP = 128
LARGEST = 448.0  # of e4m3
_LEAST = 1e-30  # a scale of zeros


@dataclass(frozen=True, slots=True, eq=False)
class Quantised:
    """``codes`` float8_e4m3fn [R, K]; ``scale`` float32 [R, G]."""

    codes: torch.Tensor
    scale: torch.Tensor

    def __len__(self) -> int:
        return len(self.codes)

    def to_dense(self) -> torch.Tensor:
        """float32 [R, K]."""
        scale = self.scale.repeat_interleave(GROUP, 1)[:, : self.codes.shape[1]]
        return self.codes.float() * scale


def can_quantise(block: tuple[int, int], num_inputs: int) -> bool:
    """Whether groups of inputs lie in one block of a weight's scales each."""
    return block[1] % GROUP == 0 or block[1] >= num_inputs


def quantise(x_RK: torch.Tensor) -> Quantised:
    """The definition, in torch. ``x_RK``: rounded to BF16 first."""
    rows, num_inputs = x_RK.shape
    groups = -(-num_inputs // GROUP)
    x_RK = torch.nn.functional.pad(x_RK.bfloat16().float(), (0, groups * GROUP - num_inputs))
    x_RGg = x_RK.view(rows, groups, GROUP)
    scale_RG = x_RGg.abs().amax(-1).clamp_min(_LEAST) / LARGEST
    codes = (x_RGg / scale_RG[..., None]).flatten(1)[:, :num_inputs].contiguous()
    return Quantised(codes.to(torch.float8_e4m3fn), scale_RG)
