"""What the inputs of a product with FP8 codes become: float16 exactly, or codes in mode "w8a8".

Shapes: R rows, K inputs, G groups of 128 inputs, the last perhaps shorter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch  # type: ignore[import-not-found, unused-ignore]

GROUP = 128
LARGEST = 448.0  # of e4m3
_LEAST = 1e-30  # a scale of zeros


@dataclass(frozen=True, slots=True, eq=False)
class Halves:
    """``values`` float16 [R, K] times ``scale`` float32 [R], powers of 2: BF16 inputs.

    Codes become float16 in one instruction and BF16 in many. A row's largest is between 2^14 and
    2^15, so what is above its 2^-29th is exact, and the rest within its 2^-40th: less than float32
    loses where such products are summed.
    """

    values: torch.Tensor
    scale: torch.Tensor

    def __len__(self) -> int:
        return len(self.values)


def halve(x_RK: torch.Tensor) -> Halves:
    """The definition, in torch. ``x_RK``: rounded to BF16 first."""
    x_RK = x_RK.bfloat16().float()
    largest_R = x_RK.abs().amax(1)
    exponent_R = largest_R.view(torch.int32) >> 23  # biased; the largest is not negative
    factor_R = (268 - exponent_R).clamp(1, 253)
    values = (x_RK * (factor_R << 23).view(torch.float32)[:, None]).half()
    return Halves(values, ((254 - factor_R) << 23).view(torch.float32))


@dataclass(frozen=True, slots=True, eq=False)
class Quantised:
    """``values`` float8_e4m3fn [R, K] times ``scale`` float32 [R, G]: never the default.

    DeepSeek-V3's way of computing (technical report, section 3.3.2): scale = largest / 448.
    """

    values: torch.Tensor
    scale: torch.Tensor

    def __len__(self) -> int:
        return len(self.values)

    def to_dense(self) -> torch.Tensor:
        """float32 [R, K]."""
        scale = self.scale.repeat_interleave(GROUP, 1)[:, : self.values.shape[1]]
        return self.values.float() * scale


def can_quantise(block: tuple[int, int], num_inputs: int) -> bool:
    """Whether groups of inputs lie in one block of a weight's scales each."""
    return block[1] % GROUP == 0 or block[1] >= num_inputs


def quantise(x_RK: torch.Tensor) -> Quantised:
    """The definition, in torch. ``x_RK``: rounded to BF16 first."""
    rows, num_inputs = x_RK.shape
    groups = -(-num_inputs // GROUP)
    x_RK = torch.nn.functional.pad(x_RK.bfloat16().float(), (0, groups * GROUP - num_inputs))
    x_RGg = x_RK.view(rows, groups, GROUP)
    largest_RG = x_RGg.abs().amax(-1).clamp_min(_LEAST)
    # By a tensor: CUDA multiplies with the reciprocal of a number.
    scale_RG = largest_RG / torch.full_like(largest_RG, LARGEST)
    codes = (x_RGg / scale_RG[..., None]).flatten(1)[:, :num_inputs].contiguous()
    return Quantised(codes.to(torch.float8_e4m3fn), scale_RG)
