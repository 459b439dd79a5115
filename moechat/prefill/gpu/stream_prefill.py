"""Prefill on a torch device, layer by layer: each weight comes once a prompt, whatever its length.

The same definition as cpp/prefill: float32 residual stream, norms, router, softmax and sums; only
matrix inputs and the KV cache are BF16, or nothing in exact mode. Shapes: T new tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch  # type: ignore[import-not-found, unused-ignore]
from numpy.typing import NDArray

from moechat import _native
from moechat.errors import NonFiniteLogits
from moechat.gpu_weights.products import (
    add_bias,
    product,
    rms_norm,
    softcap,
    tile_rows,
    tiled_product,
    tiles,
)
from moechat.kv.cache import KVCache
from moechat.models.spec import ModelSpec
from moechat.prefill.cpu import LayerOutput
from moechat.prefill.gpu.attention import Backend
from moechat.prefill.gpu.experts import add_experts, add_mlp, group_tokens
from moechat.prefill.gpu.layer_attention import LayerAttention
from moechat.prefill.gpu.prefix import host_slots, read_prefix
from moechat.prefill.gpu.rope import Angles, angles
from moechat.prefill.gpu.router import route
from moechat.prefill.gpu.source import LayerSource, needed, needed_dense


class StreamPrefill:
    """One span of new tokens after those that ``cache`` already holds, as CpuPrefill.

    ``chunk_tokens``: how many tokens' wide activations are held at once, rounded up to whole tiles
    of a product; no bit of the result depends on it. ``cache`` must be of the source's type.
    ValueError for ids that the model does not have.
    """

    def __init__(
        self,
        spec: ModelSpec,
        source: LayerSource,
        cache: KVCache,
        ids: Sequence[int],
        *,
        chunk_tokens: int = 8192,
    ) -> None:
        tokens = np.array(ids, np.int64)
        if not tokens.size or tokens.min() < 0 or tokens.max() >= spec.vocab_size:
            raise ValueError("a prefill needs at least one token, and ids of the vocabulary")
        if (cache.compute == "exact") != (source.dtype == torch.float32):
            raise ValueError(f"the cache is of mode {cache.compute}, the weights are not")
        if chunk_tokens < 1:
            raise ValueError("chunk_tokens must be positive")
        self._spec, self._source, self._cache = spec, source, cache
        self._tokens = torch.from_numpy(tokens)
        tile = tile_rows(source.device)
        self._chunk_tokens = -(-chunk_tokens // tile) * tile
        self._first_position = len(cache)
        self._prefix_slots = [cache.native.num_slots(layer) for layer in range(spec.num_layers)]
        self._angles: dict[int, Angles] = {}
        self._x_TD = torch.empty(0)
        self._layer, self._spent = 0, False
        self.attention_backends: list[Backend] = []  # of each layer that has run

    def run_layer(self, cancel: _native.CancelFlag, window: int = 0) -> LayerOutput | None:
        """Run the next layer; None when ``cancel`` cut it, and the span is then spent.

        With ``window`` > 0 also the attention that the last ``window`` tokens give to every key.
        Raises NonFiniteLogits, naming the layer.
        """
        if window < 0:
            raise ValueError("the window cannot be negative")
        if self._spent or self._layer >= self._spec.num_layers:
            raise ValueError("all layers have run, or the prefill was cut")
        layer, self._spent = self._layer, True  # unless all goes well
        self._source.begin(layer)
        try:
            with torch.inference_mode():
                output = self._run_layer(layer, cancel, window)
        finally:
            self._source.release(layer)
        if output is not None:
            self._layer, self._spent = layer + 1, False
        return output

    def logits(self, cancel: _native.CancelFlag, first: int) -> NDArray[np.float32] | None:
        """Logits [T - first, vocab] of the tokens from ``first`` on, after the last layer."""
        if self._spent or self._layer < self._spec.num_layers:
            raise ValueError("logits come after the last layer")
        if not 0 <= first < len(self._tokens):
            raise ValueError("the first token is outside the span")
        spec, source = self._spec, self._source
        head = source.matrix("head")
        if head is None:
            head = needed_dense(source, "embedding").to(source.dtype)
        out = np.empty((len(self._tokens) - first, spec.vocab_size), np.float32)
        norm = source.vector("final_norm")
        with torch.inference_mode():
            for rows in tiles(len(out), tile_rows(source.device)):
                if cancel.raised:
                    return None
                x = self._x_TD[first + rows.start : first + rows.stop]
                scores = product(rms_norm(x, norm, spec.rms_norm_eps), head)
                out[rows] = softcap(scores, spec.final_softcap).cpu().numpy()
        if not np.isfinite(out).all():
            raise _non_finite("the output head")
        return out

    def draft(self, next_id: int | None, cancel: _native.CancelFlag) -> None:
        """None: the draft layer is not streamed. Positions that it lacks cost hits alone."""
        self._spent = True

    @property
    def hidden_TD(self) -> NDArray[np.float32]:
        """The residual stream after the layer that ran last, in host memory."""
        return np.array(self._x_TD.cpu().numpy())

    def _run_layer(self, layer: int, cancel: _native.CancelFlag, window: int) -> LayerOutput | None:
        spec, source, role = self._spec, self._source, f"layers.{layer}."
        if layer == 0:
            self._x_TD = self._embedded()
        x_TD, eps = self._x_TD, spec.rms_norm_eps
        prefix = read_prefix(
            self._cache,
            layer,
            self._prefix_slots[layer],
            self._first_position,
            len(self._tokens),
            source.device,
        )
        attention = LayerAttention(
            spec, source, role, self._angles_of(layer), prefix, window, lambda: cancel.raised
        )
        norm = source.vector(role + "attention_norm")
        normed_TD = rms_norm(x_TD, norm, eps, source.dtype)
        values_TV, slots_TW, mass_n, backend = attention.run(normed_TD)
        del normed_TD
        if cancel.raised:
            return None
        o_weight, o_bias = needed(source, role + "o"), source.vector(role + "o_bias")
        post_norm = source.vector(role + "post_attention_norm")
        for chunk in tiles(len(x_TD), self._chunk_tokens):
            branch_TD = add_bias(tiled_product(values_TV[chunk], o_weight), o_bias)
            x_TD[chunk] += rms_norm(branch_TD, post_norm, eps)
        del values_TV
        ids_TK = self._feed_forward(layer, cancel)
        if ids_TK is None:
            return None
        if not bool(torch.isfinite(x_TD).all()):
            raise _non_finite(f"model.layers.{layer}")
        self.attention_backends.append(backend)
        mass = None
        if mass_n is not None:  # slots that no token sees have none
            mass = np.concatenate([np.zeros(prefix.unseen, np.float32), mass_n.cpu().numpy()])
        return LayerOutput(host_slots(slots_TW), mass, ids_TK)

    def _embedded(self) -> torch.Tensor:
        table = needed_dense(self._source, "embedding")
        x_TD = table.index_select(0, self._tokens.to(table.device)).float()
        return x_TD * self._spec.embedding_scale

    def _angles_of(self, layer: int) -> Angles:
        number = self._spec.layers[layer].rope
        if number not in self._angles:
            rope, count = self._spec.ropes[number], len(self._tokens)
            self._angles[number] = angles(rope, self._first_position, count, self._source.device)
        return self._angles[number]

    def _feed_forward(self, layer: int, cancel: _native.CancelFlag) -> NDArray[np.int32] | None:
        """The MLP or the experts join the residual stream. Expert ids [T, K], [T, 0] if dense."""
        spec, source, role = self._spec, self._source, f"layers.{layer}."
        branch_TD = torch.zeros_like(self._x_TD)
        if spec.layers[layer].moe:
            chosen = self._add_experts(layer, branch_TD, cancel)
        else:
            norm = source.vector(role + "ffn_norm")
            inputs_TD = rms_norm(self._x_TD, norm, spec.rms_norm_eps, source.dtype)
            add_mlp(spec, source, role, inputs_TD, None, branch_TD, self._chunk_tokens)
            chosen = np.empty((len(branch_TD), 0), np.int32)
        if cancel.raised:
            return None
        post_norm = source.vector(role + "post_ffn_norm")
        for chunk in tiles(len(branch_TD), self._chunk_tokens):
            self._x_TD[chunk] += rms_norm(branch_TD[chunk], post_norm, spec.rms_norm_eps)
        return chosen

    def _add_experts(
        self, layer: int, branch_TD: torch.Tensor, cancel: _native.CancelFlag
    ) -> NDArray[np.int32]:
        """Routed and shared experts join ``branch_TD``; returns the ids. Cut: it is worthless."""
        spec, source, role = self._spec, self._source, f"layers.{layer}."
        moe = spec.moe
        assert moe is not None
        inputs_TD, logits_TE, shared_T = self._routed_inputs(role, moe.num_experts)
        add_bias(logits_TE, source.vector(role + "router_bias"))
        ids_TK, weights_TK = route(moe, logits_TE, source.vector(role + "router_correction"))
        grouped = group_tokens(ids_TK, weights_TK, moe.num_experts)
        for group in source.expert_groups(layer):
            if cancel.raised:
                break
            add_experts(spec, group, inputs_TD, grouped, branch_TD)
        else:
            if moe.shared_intermediate_size:
                shared = role + "shared."
                add_mlp(spec, source, shared, inputs_TD, shared_T, branch_TD, self._chunk_tokens)
        chosen: NDArray[np.int32] = ids_TK.to(torch.int32).cpu().numpy()
        return chosen

    def _routed_inputs(
        self, role: str, num_experts: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Inputs of the experts [T, D], the router's logits [T, experts], the shared gate [T].

        The last two come of inputs that were not rounded, in float32.
        """
        spec, source, x_TD = self._spec, self._source, self._x_TD
        router = needed_dense(source, role + "router").float()
        gate = None
        if source.matrix(role + "shared_gate") is not None:
            gate = needed_dense(source, role + "shared_gate")
        norm = source.vector(role + "ffn_norm")
        inputs_TD = torch.empty_like(x_TD, dtype=source.dtype)
        logits_TE = x_TD.new_empty((len(x_TD), num_experts))
        shared_T = None if gate is None else x_TD.new_empty(len(x_TD))
        for chunk in tiles(len(x_TD), self._chunk_tokens):
            normed_TD = rms_norm(x_TD[chunk], norm, spec.rms_norm_eps)
            inputs_TD[chunk] = normed_TD
            logits_TE[chunk] = tiled_product(normed_TD, router)
            if gate is not None and shared_T is not None:
                shared_T[chunk] = torch.sigmoid(tiled_product(normed_TD, gate.float())[:, 0])
        return inputs_TD, logits_TE, shared_T


def _non_finite(where: str) -> NonFiniteLogits:
    return NonFiniteLogits(f"the logits hold NaN or infinity; the first bad values leave {where}")
