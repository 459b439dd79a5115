"""The routed experts of a group in three grouped products, for devices that have the kernels.

Shapes: T tokens, D hidden, E experts of a group, I their width; R pairs (token, expert) at a time.
"""

from __future__ import annotations

import torch  # type: ignore[import-not-found, unused-ignore]

from moechat.gpu_weights.triton_combine import combine
from moechat.gpu_weights.triton_gemm import Gated, gemm, inputs_of, tile_list, tiling
from moechat.models.spec import ModelSpec
from moechat.prefill.gpu import activations
from moechat.prefill.gpu.experts import GroupedTokens
from moechat.prefill.gpu.source import ExpertGroup


def add_grouped(
    spec: ModelSpec,
    group: ExpertGroup,
    x_TD: torch.Tensor,
    grouped: GroupedTokens,
    out_TD: torch.Tensor,
) -> bool:
    """out += what the experts of the group give their tokens. False: ``tiling`` has none.

    Pairs are in the order of experts, so a token's are added in that order, however a layer is cut
    into groups and a group into turns.
    """
    mean_rows = len(grouped.tokens) / max(1, len(grouped.begin) - 1)
    hows = [tiling(weight, mean_rows) for weight in (group.gate, group.up, group.down)]
    gate_how, up_how, down_how = hows
    if gate_how is None or up_how is None or down_how is None:
        return False
    x = inputs_of(group.gate, x_TD)
    width, hidden = group.gate.shape[1], group.down.shape[1]
    rows = max(1, activations.WORK_BYTES // activations.pair_bytes(hidden, width))
    begin = grouped.begin[group.first : group.first + len(group.gate) + 1]
    for first in range(begin[0], begin[-1], rows):
        last = min(first + rows, begin[-1])
        tokens_R = grouped.tokens[first:last]
        bounds = [min(max(b, first), last) - first for b in begin]
        device = x_TD.device
        gate_RI, up_RI, branch_RD = (
            torch.empty((last - first, columns), dtype=dtype, device=device)
            for columns, dtype in (
                (width, torch.float32),
                (width, torch.bfloat16),
                (hidden, torch.float32),
            )
        )
        tiles = tile_list(bounds, gate_how.rows, device)  # rows are the same in all three
        gemm(x, group.gate, tiles, gate_how, gate_RI, tokens_R=tokens_R, bias=group.gate_bias)
        gated = Gated(spec.activation, gate_RI, spec.activation_alpha, spec.activation_limit)
        gemm(
            x, group.up, tiles, up_how, up_RI,
            tokens_R=tokens_R, bias=group.up_bias, gated=gated,
        )  # fmt: skip
        inner = inputs_of(group.down, up_RI)
        gemm(inner, group.down, tiles, down_how, branch_RD, bias=group.down_bias)
        combine(branch_RD, grouped.weights, grouped.places_TK, first, out_TD)
    return True
