"""The MLPs of a layer: dense, shared, and routed experts as their groups arrive.

Shapes: T tokens, K experts a token, D hidden, I width of an MLP; R rows of one product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch  # type: ignore[import-not-found, unused-ignore]

from moechat.gpu_weights.activation import activate
from moechat.gpu_weights.kernels import gemm_kernels
from moechat.gpu_weights.products import add_bias, product, tiled_product, tiles
from moechat.gpu_weights.weight import Fp8Matrix, Weight
from moechat.models.spec import ModelSpec
from moechat.prefill.gpu.host_copy import HostCopies
from moechat.prefill.gpu.source import ExpertGroup, LayerSource, needed


def add_mlp(
    spec: ModelSpec,
    source: LayerSource,
    role: str,
    x_TD: torch.Tensor,
    weights_T: torch.Tensor | None,
    out_TD: torch.Tensor,
    chunk_tokens: int,
) -> None:
    """out += weights * MLP(x), for the MLP whose roles begin with ``role``; None: weights of 1."""
    gate_ID, up_ID, down_DI = (needed(source, role + part) for part in ("gate", "up", "down"))
    biases = [source.vector(f"{role}{part}_bias") for part in ("gate", "up", "down")]
    for chunk in tiles(len(x_TD), chunk_tokens):
        gate_TI = add_bias(tiled_product(x_TD[chunk], gate_ID), biases[0])
        inner_TI = _inner(spec, x_TD[chunk], gate_TI, up_ID, biases[1])
        branch_TD = add_bias(tiled_product(inner_TI, down_DI), biases[2])
        if weights_T is not None:
            branch_TD *= weights_T[chunk, None]
        out_TD[chunk] += branch_TD


def _inner(
    spec: ModelSpec,
    x_TD: torch.Tensor,
    gate_TI: torch.Tensor,
    up_ID: Weight,
    bias_I: torch.Tensor | None,
) -> torch.Tensor:
    """act(gate) * (x up^T + bias) [T, I]: float32, or BF16 from a kernel that does both."""
    kernels = gemm_kernels(x_TD.device.type) if isinstance(up_ID, Fp8Matrix) else None
    if kernels is not None:
        gated = kernels.Gated(
            spec.activation, gate_TI, spec.activation_alpha, spec.activation_limit
        )
        inner_TI: torch.Tensor | None = kernels.linear(x_TD, up_ID, torch.bfloat16, bias_I, gated)
        if inner_TI is not None:
            return inner_TI
    return activate(spec, gate_TI, add_bias(tiled_product(x_TD, up_ID), bias_I))


@dataclass(frozen=True)
class GroupedTokens:
    """The (token, expert) pairs of a layer, sorted by expert; within one by token.

    ``begin`` [E + 1] is in host memory: expert e has the pairs [begin[e], begin[e + 1]).
    ``places_TK``: a token's pairs, in the order of their experts.
    """

    tokens: torch.Tensor  # int64 [T * K]
    weights: torch.Tensor  # float32 [T * K]
    begin: list[int]
    places_TK: torch.Tensor  # int32


def group_tokens(
    ids_TK: torch.Tensor, weights_TK: torch.Tensor, num_experts: int, host: HostCopies
) -> GroupedTokens:
    """Waits for the device once, for how many tokens each expert has."""
    flat = ids_TK.flatten()
    order = flat.argsort(stable=True)
    # Not bincount: it waits for the device itself.
    counts = flat.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat))
    ends = host.start("ends", counts.cumsum(0))
    places = torch.empty_like(order, dtype=torch.int32)
    places[order] = torch.arange(len(order), dtype=torch.int32, device=order.device)
    places_TK = places.view(ids_TK.shape).sort(1).values
    begin = [0, *ends.wait().tolist()]
    return GroupedTokens(order // ids_TK.shape[1], weights_TK.flatten()[order], begin, places_TK)


def add_experts(
    spec: ModelSpec,
    group: ExpertGroup,
    x_TD: torch.Tensor,
    grouped: GroupedTokens,
    out_TD: torch.Tensor,
) -> None:
    """out += what the experts of one group give their tokens.

    Experts are added in the order of their numbers, each as one product of all its tokens, so that
    the sums do not depend on how a layer is cut into groups.
    """
    if group.gate.dtype == torch.bfloat16 and gemm_kernels(x_TD.device.type) is not None:
        from moechat.prefill.gpu.grouped_experts import add_grouped  # imports triton

        if add_grouped(spec, group, x_TD, grouped, out_TD):
            return
    for index in range(len(group.gate)):
        expert = group.first + index
        pairs = slice(grouped.begin[expert], grouped.begin[expert + 1])
        if pairs.start == pairs.stop:
            continue
        tokens_R = grouped.tokens[pairs]
        x_RD = x_TD.index_select(0, tokens_R)
        gate_RI = product(x_RD, group.gate[index])
        up_RI = product(x_RD, group.up[index])
        if group.gate_bias is not None:
            gate_RI += group.gate_bias[index]
        if group.up_bias is not None:
            up_RI += group.up_bias[index]
        branch_RD = product(activate(spec, gate_RI, up_RI), group.down[index])
        if group.down_bias is not None:
            branch_RD += group.down_bias[index]
        branch_RD *= grouped.weights[pairs, None]
        out_TD.index_add_(0, tokens_R, branch_RD)  # each token at most once: the order is fixed
