"""Products and norms of the streamed forward pass: BF16 matrix inputs, everything else float32.

Shapes: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch  # type: ignore[import-not-found, unused-ignore]

from moechat.gpu_weights.inputs import quantise
from moechat.gpu_weights.kernels import gemm_kernels
from moechat.gpu_weights.weight import Fp8Matrix, Weight

# Rows of one product. Tiles begin at multiples of it whatever the chunk size is, so that the bits
# of a row do not depend on that.
_TILE_ROWS = {"cuda": 1024, "cpu": 64}


def tile_rows(device: torch.device) -> int:
    """How many tokens share one product on this device."""
    return _TILE_ROWS.get(device.type, _TILE_ROWS["cuda"])


def tiles(count: int, size: int) -> Iterator[slice]:
    """[0, count) in slices of ``size``, the last shorter."""
    for begin in range(0, count, size):
        yield slice(begin, min(begin + size, count))


def product(x_TK: torch.Tensor, weight_NK: Weight) -> torch.Tensor:
    """x W^T, float32 [T, N], of inputs rounded to the weight's type; to BF16 for FP8.

    BF16 products are summed and given in float32: on CUDA by matrix units with a float32 output,
    elsewhere by a float32 product of the rounded inputs, as the native kernels do. Scales of FP8
    blocks never change what is rounded: a block's sum is scaled, or a float32 weight.
    """
    if isinstance(weight_NK, Fp8Matrix):
        return _of_codes(x_TK, weight_NK)
    rounded_TK = x_TK.to(weight_NK.dtype)
    if weight_NK.dtype == torch.float32:
        return rounded_TK @ weight_NK.T
    if rounded_TK.is_cuda:
        return torch.mm(rounded_TK, weight_NK.T, out_dtype=torch.float32)
    return rounded_TK.float() @ weight_NK.float().T


def _of_codes(x_TK: torch.Tensor, weight_NK: Fp8Matrix) -> torch.Tensor:
    """By a kernel; without one on CUDA of weights that are decoded and rounded once more."""
    kernels = gemm_kernels(x_TK.device.type)
    out_TN: torch.Tensor | None = kernels.linear(x_TK, weight_NK) if kernels else None
    if out_TN is not None:
        return out_TN
    if weight_NK.quantised_inputs:
        return quantise(x_TK).to_dense() @ weight_NK.to_dense(torch.float32).T
    if x_TK.is_cuda:
        return product(x_TK, weight_NK.to_dense(torch.bfloat16))
    return x_TK.bfloat16().float() @ weight_NK.to_dense(torch.float32).T


def tiled_product(x_TK: torch.Tensor, weight_NK: Weight) -> torch.Tensor:
    """product(), tile by tile where a row's bits depend on how many there are."""
    if isinstance(weight_NK, Fp8Matrix) and gemm_kernels(x_TK.device.type) is not None:
        return product(x_TK, weight_NK)
    out_TN = x_TK.new_empty((len(x_TK), len(weight_NK)), dtype=torch.float32)
    if isinstance(weight_NK, Fp8Matrix) and weight_NK.quantised_inputs:
        x_TK, weight_NK = quantise(x_TK).to_dense(), weight_NK.to_dense(torch.float32)
    elif isinstance(weight_NK, Fp8Matrix):  # decoded once
        x_TK = x_TK.bfloat16()
        weight_NK = weight_NK.to_dense(torch.bfloat16 if x_TK.is_cuda else torch.float32)
    if x_TK.device.type == "cpu":  # widened once
        x_TK = x_TK.to(x_TK.dtype if weight_NK.dtype == torch.float32 else weight_NK.dtype).float()
        weight_NK = weight_NK.float()
    for rows in tiles(len(x_TK), tile_rows(x_TK.device)):
        out_TN[rows] = product(x_TK[rows], weight_NK)
    return out_TN


def rms_norm(
    x_TK: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """[T, K] in ``dtype``; computed in float32, in tiles. None: x itself.

    Over spans of each row as long as ``weight``: a head, or the whole.
    """
    if weight is None:
        return x_TK
    out_TK = torch.empty(x_TK.shape, dtype=dtype, device=x_TK.device)
    # A reduction's order may depend on how many rows there are: the same tiles as the products'.
    for rows in tiles(len(x_TK), tile_rows(x_TK.device)):
        spans = x_TK[rows].reshape(-1, x_TK.shape[1] // len(weight), len(weight))
        scale = torch.rsqrt(spans.square().mean(-1, keepdim=True) + eps)
        out_TK[rows] = (spans * scale * weight).flatten(1)
    return out_TK


def add_bias(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x + bias, in place, unless there is none."""
    return x if bias is None else x.add_(bias)


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap), in place; 0: x itself."""
    return x.div_(cap).tanh_().mul_(cap) if cap > 0 else x
