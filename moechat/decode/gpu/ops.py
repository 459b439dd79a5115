"""The operations of a decode step on a torch device: kernels on CUDA, plain torch elsewhere.

Rows are at most 16. All shapes are static and nothing waits for the device, so that a CUDA graph
captures a step; lengths, positions and sequence numbers are read from device memory. The bits of a
row do not depend on the other rows or on how many there are. Activations are float32, whatever
their rows' stride is.

Shapes: R rows, K inputs, N outputs, H heads, P rotated pairs, W elements of a slot, D hidden, E
experts, k of them a token.
"""

from __future__ import annotations

import functools

import torch  # type: ignore[import-not-found, unused-ignore]

from moechat.decode.gpu import mailbox as plain_mailbox
from moechat.decode.gpu import plain_ops
from moechat.decode.gpu.mailbox import Mailbox
from moechat.decode.gpu.weight_views import Norm, Slots, shape_of
from moechat.gpu_weights.kernels import has_kernels
from moechat.gpu_weights.weight import Weight
from moechat.models.spec import GroupedAttention, LatentAttention, ModelSpec, MoeSpec

__all__ = [
    "Mailbox",
    "Norm",
    "Slots",
    "Weight",
    "Workspace",
    "grouped_attention",
    "latent_attention",
    "linear",
    "post",
    "route",
    "route_and_post",
    "wait",
]


class Workspace:
    """Counters of blocks that are done, 0 between kernels. Steps that overlap need one each."""

    def __init__(self, device: torch.device) -> None:
        self.counters = torch.zeros(8192, dtype=torch.int32, device=device)


def linear(
    x_RK: torch.Tensor,
    weight: Weight,
    *,
    work: Workspace | None = None,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    add: torch.Tensor | None = None,
    gated: ModelSpec | None = None,
    exact: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x W^T (+ bias) (+ add), float32 [R, N], in ``out`` if it is given; that may be ``add``.

    Inputs are rounded to bfloat16 but with float32 weights or ``exact``; kernels round those of FP8
    weights to the 11 bits of float16, scaled by a power of two. Sums are float32, FP8 scales
    multiply the sums of their blocks. ``norm``: the input is the root mean square norm of x.
    Its factor of the row multiplies the sum, so what is rounded is x times the norm's weights.
    ``gated``: x is [R, 2 K], gate and up of an MLP; the input is activate(gated, gate, up).
    """
    if has_kernels(x_RK.device.type):
        from moechat.decode.gpu import triton_linear

        if triton_linear.fits(weight):
            if out is None:
                out = x_RK.new_empty((len(x_RK), shape_of(weight)[0]))
            triton_linear.linear(
                x_RK, weight, _counters(work, x_RK.device), out,
                bias=bias, norm=norm, add=add, gated=gated, exact=exact,
            )  # fmt: skip
            return out
    result = plain_ops.linear(x_RK, weight, bias=bias, norm=norm, add=add, gated=gated, exact=exact)
    return result if out is None else out.copy_(result)


def latent_attention(
    spec: ModelSpec,
    sizes: LatentAttention,
    query_RX: torch.Tensor,
    kv_RW: torch.Tensor,
    kv_norm: torch.Tensor,
    cos_RP: torch.Tensor,
    sin_RP: torch.Tensor,
    interleaved: bool,
    kv_b: Weight,
    at: Slots,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values float32 [R, H * v], new slots [R, W] as cached), the slots written to the cache too.

    ``query_RX`` [R, H * (nope + rope)] and ``kv_RW`` as their products left them: neither normed
    nor rotated. ``kv_b`` [H * (nope + v), rank]. Absorbed (DeepSeek-V2 paper, section 2.1.2), all
    but the cache in float32.
    """
    if has_kernels(query_RX.device.type):
        from moechat.decode.gpu import triton_latent

        if triton_latent.fits(sizes, kv_b):
            return triton_latent.latent_attention(
                spec, sizes, query_RX, kv_RW, kv_norm, cos_RP, sin_RP, interleaved, kv_b, at
            )
    return plain_ops.latent_attention(
        spec, sizes, query_RX, kv_RW, kv_norm, cos_RP, sin_RP, interleaved, kv_b, at
    )


def grouped_attention(
    spec: ModelSpec,
    sizes: GroupedAttention,
    q_RX: torch.Tensor,
    k_RX: torch.Tensor,
    v_RX: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    sinks_H: torch.Tensor | None,
    cos_RP: torch.Tensor,
    sin_RP: torch.Tensor,
    interleaved: bool,
    at: Slots,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values float32 [R, H * d], new slots [R, W] as cached), the slots written to the cache too.

    Biases are in q, k and v already; norms are None where the model has none.
    """
    if has_kernels(q_RX.device.type):
        from moechat.decode.gpu import triton_grouped

        q_RHd, slot_RW = plain_ops.grouped_inputs(
            spec, sizes, q_RX, k_RX, v_RX, q_norm, k_norm, cos_RP, sin_RP, interleaved
        )
        slot_RW = slot_RW.to(at.slots_SCW.dtype)
        at.slots_SCW[at.slab_R.long(), at.own_R.long()] = slot_RW
        return triton_grouped.attend(spec, sizes, q_RHd.contiguous(), sinks_H, at), slot_RW
    return plain_ops.grouped_attention(
        spec, sizes, q_RX, k_RX, v_RX, q_norm, k_norm, sinks_H, cos_RP, sin_RP, interleaved, at
    )


def route(
    moe: MoeSpec, logits_RE: torch.Tensor, correction_E: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids int32 [R, k], weights float32 [R, k]), by falling score; ties to the lower id, NaN last.

    ``correction_E`` is added for the choice alone.
    """
    if has_kernels(logits_RE.device.type):
        return _routed(moe, logits_RE, correction_E, None, None, None)
    return plain_ops.route(moe, logits_RE, correction_E)


def post(
    x_RD: torch.Tensor,
    ids_Rk: torch.Tensor,
    weights_Rk: torch.Tensor,
    mailbox: Mailbox,
    *,
    norm: Norm | None = None,
) -> None:
    """The next request: the first ``mailbox.num_rows`` rows of x, normed if there is a norm."""
    if has_kernels(x_RD.device.type):
        from moechat.decode.gpu import triton_mailbox

        triton_mailbox.route_and_post(None, None, None, ids_Rk, weights_Rk, x_RD, mailbox, norm)
        return
    if norm is not None:
        x_RD = plain_ops.rms_norm(x_RD, norm.weight, norm.eps)
    plain_mailbox.post(x_RD, ids_Rk, weights_Rk, mailbox)


def route_and_post(
    moe: MoeSpec,
    logits_RE: torch.Tensor,
    correction_E: torch.Tensor | None,
    x_RD: torch.Tensor,
    mailbox: Mailbox,
    *,
    norm: Norm | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """route() and post() in one kernel; what route() gives."""
    if has_kernels(x_RD.device.type):
        return _routed(moe, logits_RE, correction_E, x_RD, mailbox, norm)
    ids_Rk, weights_Rk = route(moe, logits_RE, correction_E)
    post(x_RD, ids_Rk, weights_Rk, mailbox, norm=norm)
    return ids_Rk, weights_Rk


def wait(mailbox: Mailbox, x_RD: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """x + the answer to the last request, in ``out`` if it is given; that may be x.

    Once the mailbox is aborted or its limit has passed ``mailbox.error`` is set and x is left.
    """
    out_RD = torch.empty_like(x_RD) if out is None else out
    if has_kernels(x_RD.device.type):
        from moechat.decode.gpu import triton_mailbox

        triton_mailbox.wait(mailbox, x_RD, out_RD)
    else:
        plain_mailbox.wait(mailbox, x_RD, out_RD)
    return out_RD


def _counters(work: Workspace | None, device: torch.device) -> torch.Tensor:
    return (_common_workspace(device) if work is None else work).counters


@functools.cache
def _common_workspace(device: torch.device) -> Workspace:
    return Workspace(device)


def _routed(
    moe: MoeSpec,
    logits_RE: torch.Tensor,
    correction_E: torch.Tensor | None,
    x_RD: torch.Tensor | None,
    mailbox: Mailbox | None,
    norm: Norm | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    from moechat.decode.gpu import triton_mailbox

    shape = (len(logits_RE), moe.num_experts_per_token)
    ids_Rk = torch.empty(shape, dtype=torch.int32, device=logits_RE.device)
    weights_Rk = torch.empty(shape, device=logits_RE.device)
    triton_mailbox.route_and_post(
        moe, logits_RE, correction_E, ids_Rk, weights_Rk, x_RD, mailbox, norm
    )
    return ids_Rk, weights_Rk
