"""The operations of a decode step in plain torch: what the kernels compute, for any device.

Each row apart, so that no bit of one depends on the others. Shapes: R rows, K inputs, N outputs,
H heads, G of them with a key and value of their own, P rotated pairs, n slots, W elements of one,
E experts.
"""

from __future__ import annotations

import torch  # type: ignore[import-not-found, unused-ignore]

from moechat.decode.gpu.weight_views import Norm, Slots, dense, rounds_inputs
from moechat.gpu_weights import router
from moechat.gpu_weights.activation import activate
from moechat.gpu_weights.rope import Angles, rotate
from moechat.gpu_weights.weight import Weight
from moechat.models.spec import GroupedAttention, LatentAttention, ModelSpec, MoeSpec


def linear(
    x_RK: torch.Tensor,
    weight: Weight,
    *,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    add: torch.Tensor | None = None,
    gated: ModelSpec | None = None,
    exact: bool = False,
) -> torch.Tensor:
    """ops.linear without its buffers."""
    if gated is not None:
        x_RK = activate(gated, *x_RK.chunk(2, 1))
    scale_R1 = None
    if norm is not None:
        scale_R1 = torch.rsqrt(x_RK.square().mean(-1, keepdim=True) + norm.eps)
        x_RK = x_RK * norm.weight
    if rounds_inputs(weight) and not exact:
        x_RK = x_RK.to(torch.bfloat16).float()
    weight_NK = dense(weight)
    out_RN = torch.stack([torch.mv(weight_NK, row) for row in x_RK])
    if scale_R1 is not None:
        out_RN = out_RN * scale_R1
    if bias is not None:
        out_RN = out_RN + bias
    return out_RN if add is None else add + out_RN


def rms_norm(x_RK: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Over spans of a row as long as ``weight``: a head, or the whole; None: x itself."""
    if weight is None:
        return x_RK
    spans = x_RK.reshape(len(x_RK), -1, len(weight))
    scale = torch.rsqrt(spans.square().mean(-1, keepdim=True) + eps)
    return (spans * scale * weight).flatten(1)


def _softmax(
    scores_Hn: torch.Tensor, scale: float, softcap: float, sinks_H: torch.Tensor | None
) -> torch.Tensor:
    scores_Hn = scores_Hn * scale
    if softcap > 0:
        scores_Hn = torch.tanh(scores_Hn / softcap) * softcap
    if sinks_H is None:
        return torch.softmax(scores_Hn, -1)
    sinks = sinks_H[:, None]
    best = torch.maximum(scores_Hn.amax(-1, keepdim=True), sinks)
    exponentials = (scores_Hn - best).exp()
    return exponentials / (exponentials.sum(-1, keepdim=True) + torch.exp(sinks - best))


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
    """ops.latent_attention."""
    rank, nope, heads = sizes.kv_lora_rank, sizes.nope_dim, spec.num_heads
    expand = dense(kv_b).view(heads, nope + sizes.v_dim, rank)
    q_RHd = query_RX.reshape(len(query_RX), heads, -1).clone()
    by = Angles(cos_RP, sin_RP, interleaved)
    rotate(q_RHd[..., nope:], by)
    slot_RW = torch.cat([rms_norm(kv_RW[:, :rank], kv_norm, sizes.norm_eps), kv_RW[:, rank:]], 1)
    rotate(slot_RW[:, None, rank:], by)
    slot_RW = slot_RW.to(at.slots_SCW.dtype)
    values = []
    for r in range(len(q_RHd)):
        slab, begin, own = int(at.slab_R[r]), int(at.begin_R[r]), int(at.own_R[r])
        at.slots_SCW[slab, own] = slot_RW[r]
        slots_nW = at.slots_SCW[slab, begin : own + 1].float()
        absorbed = torch.einsum("hn,hnr->hr", q_RHd[r, :, :nope], expand[:, :nope])
        scores = torch.cat([absorbed, q_RHd[r, :, nope:]], -1) @ slots_nW.T
        weights = _softmax(scores, spec.softmax_scale, spec.attention_softcap, None)
        latent = weights @ slots_nW[:, :rank]
        values.append(torch.einsum("hr,hvr->hv", latent, expand[:, nope:]).flatten())
    return torch.stack(values), slot_RW


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
    """ops.grouped_attention."""
    q_RHd, slot_RW = grouped_inputs(
        spec, sizes, q_RX, k_RX, v_RX, q_norm, k_norm, cos_RP, sin_RP, interleaved
    )
    slot_RW = slot_RW.to(at.slots_SCW.dtype)
    values = []
    for r in range(len(q_RHd)):
        slab, begin, own = int(at.slab_R[r]), int(at.begin_R[r]), int(at.own_R[r])
        at.slots_SCW[slab, own] = slot_RW[r]
        slots_nW = at.slots_SCW[slab, begin : own + 1].float()
        keys, held = slots_nW.view(len(slots_nW), 2, sizes.num_kv_heads, -1).unbind(1)
        q = q_RHd[r].view(sizes.num_kv_heads, -1, q_RHd.shape[2])
        scores = torch.einsum("gqd,ngd->gqn", q, keys)
        weights = _softmax(
            scores.flatten(0, 1), spec.softmax_scale, spec.attention_softcap, sinks_H
        )
        values.append(torch.einsum("gqn,ngd->gqd", weights.view(scores.shape), held).flatten())
    return torch.stack(values), slot_RW


def grouped_inputs(
    spec: ModelSpec,
    sizes: GroupedAttention,
    q_RX: torch.Tensor,
    k_RX: torch.Tensor,
    v_RX: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    cos_RP: torch.Tensor,
    sin_RP: torch.Tensor,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(queries [R, H, d], slots float32 [R, W]): normed, clipped and rotated."""
    rows, groups = len(q_RX), sizes.num_kv_heads
    q, k = rms_norm(q_RX, q_norm, spec.rms_norm_eps), rms_norm(k_RX, k_norm, spec.rms_norm_eps)
    if sizes.clip > 0:
        q, k, v_RX = (x.clamp(-sizes.clip, sizes.clip) for x in (q, k, v_RX))
    q_RHd = q.reshape(rows, spec.num_heads, -1).clone()
    k_RGd = k.reshape(rows, groups, -1).clone()
    by = Angles(cos_RP, sin_RP, interleaved)
    rotate(q_RHd, by)
    rotate(k_RGd, by)
    return q_RHd, torch.cat([k_RGd.flatten(1), v_RX], 1)


def route(
    moe: MoeSpec, logits_RE: torch.Tensor, correction_E: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """ops.route: prefill's rule, ids int32."""
    ids_RK, weights_RK = router.route(moe, logits_RE, correction_E)
    return ids_RK.to(torch.int32), weights_RK
