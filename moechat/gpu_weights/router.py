"""Which experts each token goes to: cpp/kernels/router/router.cpp for many tokens at once.

Shapes: T tokens, E experts, K of them chosen, N groups.
"""

from __future__ import annotations

import torch  # type: ignore[import-not-found, unused-ignore]

from moechat.models.spec import MoeSpec

_LAST = -torch.inf
_LEAST_SUM = 1e-20


def route(
    moe: MoeSpec, logits_TE: torch.Tensor, correction_E: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids int64 [T, K], weights float32 [T, K]), by falling score, ties to the lower id.

    ``correction_E`` is added for the choice alone. NaN scores are chosen last; the ids of a token
    are distinct whatever the logits are.
    """
    if moe.scoring == "sigmoid":
        score_TE = torch.sigmoid(logits_TE)
    elif moe.scoring == "softmax":
        score_TE = torch.softmax(logits_TE, -1)
    else:
        score_TE = logits_TE
    selection_TE = score_TE if correction_E is None else score_TE + correction_E
    selection_TE = torch.where(selection_TE.isnan(), _LAST, selection_TE)
    if moe.num_groups_kept < moe.num_groups:
        selection_TE = _in_kept_groups(moe, selection_TE)
    ids_TK = _best(selection_TE, moe.num_experts_per_token)
    weights_TK = score_TE.gather(1, ids_TK)
    if moe.scoring == "softmax_chosen":
        weights_TK = torch.softmax(weights_TK, -1)
    if moe.normalise_weights:
        weights_TK = weights_TK * (moe.routed_scaling / (weights_TK.sum(-1, True) + _LEAST_SUM))
    else:
        weights_TK = weights_TK * moe.routed_scaling
    return ids_TK, weights_TK


def _best(values: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the ``count`` largest of the last axis, ties to the lower; topk does not say."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _in_kept_groups(moe: MoeSpec, selection_TE: torch.Tensor) -> torch.Tensor:
    """The scores of the groups that are kept, above any of the others.

    A group counts its best score, or its two best with "sigmoid".
    """
    groups_TNe = selection_TE.view(len(selection_TE), moe.num_groups, -1)
    two = moe.scoring == "sigmoid" and groups_TNe.shape[2] > 1
    counted_TN = groups_TNe.topk(2 if two else 1, -1).values.sum(-1)
    counted_TN = torch.where(counted_TN.isnan(), _LAST, counted_TN)
    kept_Tn = _best(counted_TN, moe.num_groups_kept)
    kept_TN = torch.zeros_like(counted_TN, dtype=torch.bool).scatter_(1, kept_Tn, True)
    lowest = torch.finfo(selection_TE.dtype).min  # a NaN's score in a kept group comes before
    masked_TNe = torch.where(kept_TN[..., None], groups_TNe.clamp_min(lowest), _LAST)
    return masked_TNe.flatten(1)
