"""The operations of a decode step in plain torch: what the kernels compute, for any device.

Each row apart, so that no bit of one depends on the others. Shapes: R rows, K inputs, N outputs,
H heads, G of them with a key and value of their own, P rotated pairs, n slots, W elements of one,
E experts.
"""

from __future__ import annotations

import torch  # type: ignore[import-not-found, unused-ignore]

from moechat.decode.gpu.weight_views import Norm, Slots, Weight, dense, rounds_inputs
from moechat.models.spec import GroupedAttention, LatentAttention, ModelSpec, MoeSpec

_LAST = -torch.inf
_LEAST_SUM = 1e-20


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


def rotate(
    x_RHd: torch.Tensor, cos_RP: torch.Tensor, sin_RP: torch.Tensor, interleaved: bool
) -> None:
    """Rotates the first 2 P elements of every head in place."""
    pairs = cos_RP.shape[1]
    part = x_RHd[..., : 2 * pairs]
    if interleaved:
        first, second = part[..., 0::2], part[..., 1::2]
    else:
        first, second = part[..., :pairs], part[..., pairs:]
    cos, sin = cos_RP[:, None], sin_RP[:, None]
    turned = first * cos - second * sin
    second.copy_(first * sin + second * cos)
    first.copy_(turned)


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
    rotate(q_RHd[..., nope:], cos_RP, sin_RP, interleaved)
    slot_RW = torch.cat([rms_norm(kv_RW[:, :rank], kv_norm, sizes.norm_eps), kv_RW[:, rank:]], 1)
    rotate(slot_RW[:, None, rank:], cos_RP, sin_RP, interleaved)
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
    rotate(q_RHd, cos_RP, sin_RP, interleaved)
    rotate(k_RGd, cos_RP, sin_RP, interleaved)
    return q_RHd, torch.cat([k_RGd.flatten(1), v_RX], 1)


def route(
    moe: MoeSpec, logits_RE: torch.Tensor, correction_E: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """ops.route: prefill's rule for a few rows, ids int32."""
    if moe.scoring == "sigmoid":
        score_RE = torch.sigmoid(logits_RE)
    elif moe.scoring == "softmax":
        score_RE = torch.softmax(logits_RE, -1)
    else:
        score_RE = logits_RE
    select_RE = score_RE if correction_E is None else score_RE + correction_E
    select_RE = torch.where(select_RE.isnan(), _LAST, select_RE)
    if moe.num_groups_kept < moe.num_groups:
        select_RE = _in_kept_groups(moe, select_RE)
    order_RE = select_RE.sort(dim=-1, descending=True, stable=True).indices
    ids_RK = order_RE[:, : moe.num_experts_per_token]
    weights_RK = score_RE.gather(1, ids_RK)
    if moe.scoring == "softmax_chosen":
        weights_RK = torch.softmax(weights_RK, -1)
    if moe.normalise_weights:
        weights_RK = weights_RK * (moe.routed_scaling / (weights_RK.sum(-1, True) + _LEAST_SUM))
    else:
        weights_RK = weights_RK * moe.routed_scaling
    return ids_RK.to(torch.int32), weights_RK


def _in_kept_groups(moe: MoeSpec, select_RE: torch.Tensor) -> torch.Tensor:
    """Scores outside the kept groups are least; a group counts its best, or two with "sigmoid"."""
    groups = select_RE.view(len(select_RE), moe.num_groups, -1)
    two = moe.scoring == "sigmoid" and groups.shape[2] > 1
    counted = groups.topk(2 if two else 1, -1).values.sum(-1)
    counted = torch.where(counted.isnan(), _LAST, counted)
    best = counted.sort(dim=-1, descending=True, stable=True).indices[:, : moe.num_groups_kept]
    kept = torch.zeros_like(counted, dtype=torch.bool).scatter_(1, best, True)
    lowest = torch.finfo(select_RE.dtype).min  # a NaN's stand-in in a kept group comes before
    return torch.where(kept[..., None], groups.clamp_min(lowest), _LAST).flatten(1)


def activate(spec: ModelSpec, gate_RI: torch.Tensor, up_RI: torch.Tensor) -> torch.Tensor:
    """act(gate) * up, float32; models/spec.py has the formulas."""
    if spec.activation == "silu":
        return torch.nn.functional.silu(gate_RI) * up_RI
    if spec.activation == "gelu_tanh":
        return torch.nn.functional.gelu(gate_RI, approximate="tanh") * up_RI
    gate_RI = gate_RI.clamp(max=spec.activation_limit)
    up_RI = up_RI.clamp(-spec.activation_limit, spec.activation_limit)
    return (up_RI + 1) * gate_RI * torch.sigmoid(spec.activation_alpha * gate_RI)
