"""Causal attention of a span to its keys, by a backend that is named and never falls back.

"cudnn" and "efficient": fused kernels of cuDNN and of torch, BF16 inputs, for full attention on
CUDA; the first is the faster one, and takes fewer widths on older cards. "plain": float32 scores of
a block of queries at a time, for windows, sinks, softcaps, other widths and devices and exact mode,
as cpp/kernels/attention/attend_block.h.

Shapes: T queries, the tokens of the last T of n keys; H query heads, G heads of keys and values
(H a multiple of G), d and v their widths.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch  # type: ignore[import-not-found, unused-ignore]

from moechat.gpu_weights.products import softcap, tiles

Backend = Literal["cudnn", "efficient", "plain"]
SCORE_BYTES = 256 << 20  # of one block of queries on CUDA
_BLOCK_ROWS = 64


@dataclass(frozen=True)
class AttentionRule:
    """How scores become weights.

    ``visible_begin``: for each query the first key that it sees (rising; in host memory), or None
    for all up to its own. ``sinks_H``: one more logit a head, with no value.
    """

    scale: float
    softcap: float = 0.0
    sinks_H: torch.Tensor | None = None
    visible_begin: torch.Tensor | None = None

    def begin(self, query: int) -> int:
        """The first key that the query, and so any later one, sees."""
        return 0 if self.visible_begin is None else int(self.visible_begin[query])


def choose_backend(
    device: torch.device, dtype: torch.dtype, rule: AttentionRule, widths: tuple[int, int]
) -> Backend:
    """The fastest that computes ``rule`` for inputs of ``dtype`` and (d, v) of a head."""
    special = rule.softcap > 0 or rule.sinks_H is not None or rule.visible_begin is not None
    if device.type != "cuda" or dtype != torch.bfloat16 or special:
        return "plain"
    fused: tuple[Backend, ...] = ("cudnn", "efficient")
    return next((backend for backend in fused if _takes(backend, device, widths)), "plain")


@functools.cache
def _takes(backend: Backend, device: torch.device, widths: tuple[int, int]) -> bool:
    """Whether a fused kernel takes such heads: tried, since each release has other rules."""
    if any(width % 8 for width in widths):
        return False
    q, k, v = (
        torch.zeros((1, 1, 64, width), dtype=torch.bfloat16, device=device)
        for width in (widths[0], *widths)
    )
    try:
        values, _ = (_cudnn if backend == "cudnn" else _efficient)(q, k, v, 1.0, causal=True)
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        raise  # says nothing of the widths, and what is returned is kept
    except RuntimeError:
        return False
    return bool(values.shape == v.shape)


def attend(
    backend: Backend,
    q_THd: torch.Tensor,
    k_nGd: torch.Tensor,
    v_nGv: torch.Tensor,
    rule: AttentionRule,
) -> torch.Tensor:
    """[T, H, v], float32 or bfloat16; fused kernels round what they are given to bfloat16."""
    if backend == "plain":
        return _plain(q_THd, k_nGd, v_nGv, rule)
    fused = _cudnn if backend == "cudnn" else _efficient
    return _fused(fused, q_THd, k_nGd, v_nGv, rule)


def _block_rows(heads: int, num_keys: int, device: torch.device) -> int:
    """By the shape of the whole alone: neither the chunk size nor free memory change the bits."""
    if device.type == "cpu":
        return _BLOCK_ROWS
    return max(16, min(1024, SCORE_BYTES // (4 * heads * num_keys) // 16 * 16))


def _probabilities(
    q_THd: torch.Tensor, k_nGd: torch.Tensor, rule: AttentionRule, rows: slice
) -> tuple[torch.Tensor, slice]:
    """([G, H / G, R, keys] float32, which keys) of the queries ``rows``."""
    num_tokens, num_keys = len(q_THd), len(k_nGd)
    first_slot = num_keys - num_tokens
    keys = slice(rule.begin(rows.start), first_slot + rows.stop)
    groups = k_nGd.shape[1]
    q = q_THd[rows].float().transpose(0, 1)  # [H, R, d]
    k = k_nGd[keys].float().permute(1, 2, 0)  # [G, d, keys]
    scores = q.reshape(groups, -1, q.shape[2]) @ k
    scores = scores.view(groups, -1, q.shape[1], k.shape[2]).mul_(rule.scale)
    softcap(scores, rule.softcap)
    slots = torch.arange(keys.start, keys.stop, device=k.device)
    own = torch.arange(rows.start, rows.stop, device=k.device) + first_slot
    hidden = slots > own[:, None]
    if rule.visible_begin is not None:
        hidden |= slots < rule.visible_begin[rows].to(k.device)[:, None]
    scores.masked_fill_(hidden, -torch.inf)
    if rule.sinks_H is None:
        return torch.softmax(scores, -1), keys
    sinks = rule.sinks_H.reshape(groups, -1, 1, 1)
    best = torch.maximum(scores.amax(-1, keepdim=True), sinks)
    exponentials = scores.sub_(best).exp_()
    sums = exponentials.sum(-1, keepdim=True) + torch.exp(sinks - best)
    return exponentials.div_(sums), keys


def _plain(
    q_THd: torch.Tensor, k_nGd: torch.Tensor, v_nGv: torch.Tensor, rule: AttentionRule
) -> torch.Tensor:
    num_tokens, heads = q_THd.shape[:2]
    out_THv = q_THd.new_empty((num_tokens, heads, v_nGv.shape[2]), dtype=torch.float32)
    for rows in tiles(num_tokens, _block_rows(heads, len(k_nGd), q_THd.device)):
        weights, keys = _probabilities(q_THd, k_nGd, rule, rows)
        v = v_nGv[keys].float().transpose(0, 1)  # [G, keys, v]
        values = weights.flatten(1, 2) @ v  # [G, H / G * R, v]
        out_THv[rows] = values.view(heads, -1, values.shape[2]).transpose(0, 1)
    return out_THv


def add_window_mass(
    q_THd: torch.Tensor, k_nGd: torch.Tensor, rule: AttentionRule, window: int, mass_n: torch.Tensor
) -> None:
    """mass[key] += what the last ``window`` queries give to it, summed over queries and heads."""
    num_tokens, heads = q_THd.shape[:2]
    first = max(0, num_tokens - window)
    size = _block_rows(heads, len(k_nGd), q_THd.device)
    for block in tiles(num_tokens - first, size):
        rows = slice(first + block.start, first + block.stop)
        weights, keys = _probabilities(q_THd, k_nGd, rule, rows)
        mass_n[keys] += weights.sum((0, 1, 2))


def _fused(
    kernel: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    q_THd: torch.Tensor,
    k_nGd: torch.Tensor,
    v_nGv: torch.Tensor,
    rule: AttentionRule,
) -> torch.Tensor:
    """A cached prefix and the span itself are attended to apart, and joined by their sums.

    So the mask is square and aligned, whichever corner a library counts from.
    """
    repeat = q_THd.shape[1] // k_nGd.shape[1]
    if repeat > 1:
        k_nGd, v_nGv = (x.repeat_interleave(repeat, 1) for x in (k_nGd, v_nGv))
    q, k, v = (x.to(torch.bfloat16).transpose(0, 1)[None] for x in (q_THd, k_nGd, v_nGv))
    prefix = k.shape[2] - q.shape[2]
    own, own_sums = kernel(q, k[:, :, prefix:], v[:, :, prefix:], rule.scale, causal=True)
    if prefix > 0:
        before, before_sums = kernel(
            q, k[:, :, :prefix], v[:, :, :prefix], rule.scale, causal=False
        )
        share = torch.sigmoid(own_sums - before_sums)
        own = own.float() * share + before.float() * (1 - share)
    return own[0].transpose(0, 1)


def _cudnn(
    q_1HTd: torch.Tensor, k_1Hnd: torch.Tensor, v_1Hnv: torch.Tensor, scale: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values [1, H, T, v], logarithms of the sums of exponentials float32 [1, H, T, 1]).

    The operator itself, not the one that chooses: that falls back to slow kernels without a word.
    """
    values, sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q_1HTd, k_1Hnd, v_1Hnv, None, True, 0.0, causal, False, scale=scale
    )
    return values, sums.reshape(*values.shape[:3], 1).float()


def _efficient(
    q_1HTd: torch.Tensor, k_1Hnd: torch.Tensor, v_1Hnv: torch.Tensor, scale: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by torch's own kernel, whose sums are those of whole blocks of queries."""
    values, sums, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q_1HTd, k_1Hnd, v_1Hnv, None, True, 0.0, causal, scale=scale
    )
    return values, sums[..., : values.shape[2], None].float()
