"""The attention half of a layer, latent and grouped: from normed tokens to values of all heads.

As cpp/prefill/prefill_attention.cpp. Shapes: T new tokens, n keys (the seen prefix, then the new
ones), D hidden, W elements of a slot, H heads, G of them at a time, d and v widths of a head's key
and value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch  # type: ignore[import-not-found, unused-ignore]

from moechat.gpu_weights.products import add_bias, rms_norm, tiled_product, tiles
from moechat.gpu_weights.rope import Angles, rotate
from moechat.gpu_weights.weight import Weight, rows_of
from moechat.models.spec import GroupedAttention, LatentAttention, ModelSpec
from moechat.prefill.gpu.attention import (
    AttentionRule,
    Backend,
    add_window_mass,
    attend,
    choose_backend,
)
from moechat.prefill.gpu.prefix import Prefix
from moechat.prefill.gpu.source import LayerSource, needed

GROUP_BYTES = 1 << 30  # queries, keys and values of the heads at a time, and what they give
WIDE_ROWS = 4096  # whole tiles of a product, so that no bit depends on it


@dataclass(frozen=True)
class LayerAttention:
    """One layer's attention. ``role`` ends in a dot; ``window`` > 0 asks for the window mass."""

    spec: ModelSpec
    source: LayerSource
    role: str
    by: Angles
    prefix: Prefix
    window: int

    def run(
        self, normed_TD: torch.Tensor, slots_TW: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, Backend]:
        """(values [T, H * v], mass float32 [n] or None, backend).

        ``slots_TW``: the tokens' new slots as cached (slots.py); attention sees them so rounded.
        """
        rule = AttentionRule(
            scale=self.spec.softmax_scale,
            softcap=self.spec.attention_softcap,
            sinks_H=self.source.vector(self.role + "sinks"),
            visible_begin=self.prefix.visible_begin,
        )
        sizes = self.spec.attention
        widths = (
            (sizes.nope_dim + sizes.rope_dim, sizes.v_dim)
            if isinstance(sizes, LatentAttention)
            else (sizes.head_dim, sizes.head_dim)
        )
        backend = choose_backend(self.source.device, self.source.dtype, rule, widths)
        slots_nW = torch.cat([self.prefix.slots_PW, slots_TW.float()])
        if isinstance(sizes, LatentAttention):
            return *self._latent(sizes, normed_TD, slots_nW, rule, backend), backend
        return *self._grouped(sizes, normed_TD, slots_nW, rule, backend), backend

    def _latent(
        self,
        sizes: LatentAttention,
        normed_TD: torch.Tensor,
        slots_nW: torch.Tensor,
        rule: AttentionRule,
        backend: Backend,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Un-absorbed (DeepSeek-V2 paper, section 2.1), some heads at a time."""
        rank, nope = sizes.kv_lora_rank, sizes.nope_dim
        q_input, query_role = normed_TD, "q"
        if sizes.q_lora_rank:
            norm = self.source.vector(self.role + "q_a_norm")
            latent_T = self._product("q_a", normed_TD)
            q_input = rms_norm(latent_T, norm, sizes.norm_eps, self.source.dtype)
            query_role = "q_b"
        q_weight = needed(self.source, self.role + query_role)
        kv_weight = needed(self.source, self.role + "kv_b")

        num_tokens, num_keys = len(q_input), len(slots_nW)
        # Fused kernels take BF16: nothing is kept in float32 for them but some rows at a time.
        kind = torch.float32 if backend == "plain" else torch.bfloat16
        width = nope + sizes.rope_dim

        def heads(group: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            count = group.stop - group.start
            shapes = (num_tokens, width), (num_keys, width), (num_keys, sizes.v_dim)
            q_THd, k_nHd, v_nHv = (
                slots_nW.new_empty((rows, count, columns), dtype=kind) for rows, columns in shapes
            )
            for rows in tiles(num_tokens, WIDE_ROWS):
                q = tiled_product(q_input[rows], self._of_heads(q_weight, group))
                q = q.view(len(q), count, width)
                rotate(q[..., nope:], self.by.of(rows))
                q_THd[rows] = q
            for rows in tiles(num_keys, WIDE_ROWS):
                latent = slots_nW[rows, :rank]
                k_v = tiled_product(latent, self._of_heads(kv_weight, group))
                k_v = k_v.view(len(k_v), count, -1)
                k_nHd[rows, :, :nope], v_nHv[rows] = k_v[..., :nope], k_v[..., nope:]
            k_nHd[..., nope:] = slots_nW[:, None, rank:]
            return q_THd, k_nHd, v_nHv

        head_bytes = kind.itemsize * (width + sizes.v_dim) * (num_tokens + num_keys)
        return self._over_heads(
            heads, max(1, GROUP_BYTES // head_bytes), 1, sizes.v_dim, num_keys, rule, backend
        )

    def _grouped(
        self,
        sizes: GroupedAttention,
        normed_TD: torch.Tensor,
        slots_nW: torch.Tensor,
        rule: AttentionRule,
        backend: Backend,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        kv_heads = sizes.num_kv_heads
        q = add_bias(self._product("q", normed_TD), self.source.vector(self.role + "q_bias"))
        q = rms_norm(q, self.source.vector(self.role + "q_norm"), self.spec.rms_norm_eps)
        if sizes.clip > 0:
            q = q.clamp(-sizes.clip, sizes.clip)
        q_THd = q.view(len(q), self.spec.num_heads, -1)
        rotate(q_THd, self.by)
        k_nGd, v_nGd = slots_nW.view(len(slots_nW), 2, kv_heads, -1).unbind(1)
        repeat = self.spec.num_heads // kv_heads

        def heads(group: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            kv = slice(group.start // repeat, group.stop // repeat)
            return q_THd[:, group], k_nGd[:, kv], v_nGd[:, kv]

        return self._over_heads(
            heads, self.spec.num_heads, repeat, sizes.head_dim, len(slots_nW), rule, backend
        )

    def _over_heads(
        self,
        heads: Callable[[slice], tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        group: int,
        multiple: int,
        value_width: int,
        num_keys: int,
        rule: AttentionRule,
        backend: Backend,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of at most ``group`` heads at a time, about evenly, by whole ``multiple``s."""
        total, num_tokens = self.spec.num_heads, len(self.by.cos_TP)
        units = total // multiple
        group = -(-units // -(-units // max(1, group // multiple))) * multiple
        device, dtype = self.source.device, self.source.dtype
        values_THv = torch.empty((num_tokens, total, value_width), dtype=dtype, device=device)
        mass_n = torch.zeros(num_keys, device=device) if self.window > 0 else None
        for first in range(0, total, group):
            some = slice(first, min(first + group, total))
            q_TGd, k_nGd, v_nGv = heads(some)
            own_rule = rule
            if rule.sinks_H is not None:
                own_rule = replace(rule, sinks_H=rule.sinks_H[some])
            values_THv[:, some] = attend(backend, q_TGd, k_nGd, v_nGv, own_rule).to(dtype)
            if mass_n is not None:
                add_window_mass(q_TGd, k_nGd, own_rule, self.window, mass_n)
        if mass_n is not None:
            mass_n /= total
        return values_THv.flatten(1), mass_n

    def _of_heads(self, weight: Weight, heads: slice) -> Weight:
        """The rows of some heads."""
        each = len(weight) // self.spec.num_heads
        return rows_of(weight, slice(heads.start * each, heads.stop * each))

    def _product(self, part: str, x: torch.Tensor) -> torch.Tensor:
        return tiled_product(x, needed(self.source, self.role + part))
