"""One device's part of a streamed prefill: its own tokens, and its own experts for all tokens.

A lane has the residual stream of its tokens. In each layer it computes their slots, and attends
with them to the slots of all lanes; it routes them; then its experts take the tokens of all lanes,
and each lane adds up what the experts of all give its own. A lane alone has all of both and
exchanges nothing.

Memory beside the weights, in bytes a token of T (all, t its own), DeepSeek-V3's sizes in brackets:
the residual stream 4 D of t [28.7 KB] always; normed inputs 2 D of t [14.3 KB] until attention has
its queries; values of a chunk 2 H v [32.8 KB] until its output product; inputs of the experts 2 D
of T [14.3 KB] and what they give 4 D of T [28.7 KB] from the router on. Attention's heads, the
experts and the chunks of a product have more while they run (LayerAttention, add_experts).

Shapes: T all new tokens, t of the lane, D hidden, W elements of a slot, E experts, K a token's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch  # type: ignore[import-not-found, unused-ignore]
from numpy.typing import NDArray

from moechat.gpu_weights.products import add_bias, rms_norm, tiled_product, tiles
from moechat.gpu_weights.rope import Angles, angles
from moechat.gpu_weights.router import route
from moechat.models.spec import ModelSpec, MoeSpec
from moechat.prefill.gpu.attention import Backend
from moechat.prefill.gpu.exchange import Exchange
from moechat.prefill.gpu.experts import add_experts, add_mlp, group_tokens
from moechat.prefill.gpu.host_copy import HostCopies, HostCopy, HostReads
from moechat.prefill.gpu.lanes import Chunk, current
from moechat.prefill.gpu.layer_attention import LayerAttention
from moechat.prefill.gpu.prefix import Prefix
from moechat.prefill.gpu.slots import new_slots
from moechat.prefill.gpu.source import LayerSource, needed, needed_dense


@dataclass
class LaneOutput:
    """What a layer leaves of a lane's tokens; ``masses`` by chunk, None without a window's query.

    ``finite``: whether the residual stream is, None without tokens.
    """

    slots_tW: HostCopy | None
    ids_tK: HostCopy | None
    masses: list[HostCopy | None]
    backend: Backend | None
    finite: HostCopy | None = None


@runtime_checkable
class RowSource(Protocol):
    """A source that has an embedding's rows without the rest of it."""

    def rows(self, role: str, numbers: NDArray[np.int64]) -> torch.Tensor | None:
        """float32 [n, inputs]."""


class Lane:
    """Lane ``number`` of ``plan``, which has the chunks of each. One thread at a time."""

    def __init__(
        self,
        number: int,
        plan: list[list[Chunk]],
        spec: ModelSpec,
        source: LayerSource,
        exchange: Exchange,
        *,
        first_position: int,
        num_tokens: int,
        chunk_tokens: int,
    ) -> None:
        self.number, self.chunks, self.source = number, plan[number], source
        self.num_own = sum(len(chunk) for chunk in self.chunks)
        self.x_tD = torch.empty(0)
        self._plan, self._spec, self._exchange = plan, spec, exchange
        self._first_position, self._num_tokens = first_position, num_tokens
        self._chunk_tokens = chunk_tokens
        self._angles: dict[tuple[int, int], Angles] = {}
        self._host, self._reads = HostCopies(), HostReads()

    def embed(self, tokens: NDArray[np.int64]) -> None:
        """The residual stream before the first layer. ``tokens``: all T."""
        with current(self.source.device):
            self._embed(tokens)

    def _embed(self, tokens: NDArray[np.int64]) -> None:
        own = np.concatenate([tokens[chunk.span] for chunk in self.chunks] or [tokens[:0]])
        if isinstance(self.source, RowSource):
            x_tD = self.source.rows("embedding", own)
            assert x_tD is not None
        else:
            table = needed_dense(self.source, "embedding")
            x_tD = table.index_select(0, torch.from_numpy(own).to(table.device)).float()
        self.x_tD = x_tD.mul_(self._spec.embedding_scale)

    def start_from(self, hidden_TD: NDArray[np.float32]) -> None:
        """The residual stream between layers, of all tokens."""
        own = [hidden_TD[chunk.span] for chunk in self.chunks] or [hidden_TD[:0]]
        self.x_tD = torch.from_numpy(np.concatenate(own)).to(self.source.device)

    def run_layer(self, layer: int, prefix: Prefix, window: int) -> LaneOutput:
        """Ask the device for all of a layer. ``prefix`` as the whole span sees it, in host memory.

        The host waits for the device once, for how many tokens each expert has.
        """
        with current(self.source.device), torch.inference_mode():
            try:
                self.source.begin(layer)
                output = self._attention(layer, prefix, window)
                output.ids_tK = self._feed_forward(layer)
            finally:
                self.source.release(layer)
            if self.num_own:
                least, most = self.x_tD.aminmax()  # NaN is both
                finite = torch.isfinite(least) & torch.isfinite(most)
                output.finite = self._host.start(f"finite{layer % 2}", finite)
        return output

    def _attention(self, layer: int, prefix: Prefix, window: int) -> LaneOutput:
        spec, source, role = self._spec, self.source, f"layers.{layer}."
        eps, norm = spec.rms_norm_eps, source.vector(role + "attention_norm")
        held_PW = self._reads.start("prefix", prefix.slots_PW, source.device)
        prefix = replace(prefix, slots_PW=held_PW.float())
        normed = [rms_norm(self.x_tD[chunk.own], norm, eps, source.dtype) for chunk in self.chunks]
        by = [self._angles_of(layer, chunk) for chunk in self.chunks]
        slots = [new_slots(spec, source, role, *each) for each in zip(by, normed)]
        slots_TW = None
        if len(self._plan) > 1:
            slots_TW = self._gathered("slots", slots, spec.kv_width, source.dtype)
        output = LaneOutput(None, None, [], None)
        o_weight, o_bias = needed(source, role + "o"), source.vector(role + "o_bias")
        post_norm = source.vector(role + "post_attention_norm")
        for chunk, angles_, own_slots in zip(self.chunks, by, slots):
            queries = min(len(chunk), max(0, chunk.span.stop - (self._num_tokens - window)))
            attention = LayerAttention(
                spec,
                source,
                role,
                angles_,
                _prefix_of(prefix, chunk, slots_TW),
                queries if window else 0,
            )
            values_TV, mass_n, output.backend = attention.run(normed.pop(0), own_slots)
            name = f"mass{len(output.masses)}"
            output.masses.append(None if mass_n is None else self._host.start(name, mass_n))
            x_TD = self.x_tD[chunk.own]
            for rows in tiles(len(x_TD), self._chunk_tokens):
                branch_TD = add_bias(tiled_product(values_TV[rows], o_weight), o_bias)
                x_TD[rows] += rms_norm(branch_TD, post_norm, eps)
            del values_TV
        if slots:
            output.slots_tW = self._host.start("slots", _joined(slots))
        return output

    def _angles_of(self, layer: int, chunk: Chunk) -> Angles:
        key = self._spec.layers[layer].rope, chunk.span.start
        if key not in self._angles:
            first = self._first_position + chunk.span.start
            rope = self._spec.ropes[key[0]]
            self._angles[key] = angles(rope, first, len(chunk), self.source.device)
        return self._angles[key]

    def _feed_forward(self, layer: int) -> HostCopy | None:
        """The MLP or the experts join the residual stream. Expert ids [t, K] of a MoE layer."""
        spec, source, role = self._spec, self.source, f"layers.{layer}."
        ids = None
        if spec.layers[layer].moe:
            branch_tD, ids = self._experts(layer)
        else:
            norm = source.vector(role + "ffn_norm")
            inputs_tD = rms_norm(self.x_tD, norm, spec.rms_norm_eps, source.dtype)
            branch_tD = torch.zeros_like(self.x_tD)
            add_mlp(spec, source, role, inputs_tD, None, branch_tD, self._chunk_tokens)
        post_norm = source.vector(role + "post_ffn_norm")
        for chunk in tiles(self.num_own, self._chunk_tokens):
            self.x_tD[chunk] += rms_norm(branch_tD[chunk], post_norm, spec.rms_norm_eps)
        return ids

    def _experts(self, layer: int) -> tuple[torch.Tensor, HostCopy | None]:
        """What the routed and shared experts of all lanes give the own tokens [t, D]; the ids."""
        spec, source, role = self._spec, self.source, f"layers.{layer}."
        moe = spec.moe
        assert moe is not None
        inputs_tD, shared_t, ids_tK, weights_tK = self._routed(role, moe)
        ids = self._host.start("ids", ids_tK.to(torch.int32)) if self.num_own else None
        inputs_TD, ids_TK, weights_TK = inputs_tD, ids_tK, weights_tK
        # Of several lanes the shared expert computes while the others' inputs come.
        shared_tD = None if len(self._plan) == 1 else torch.zeros_like(self.x_tD)

        def add_shared(out_tD: torch.Tensor) -> None:
            if moe.shared_intermediate_size:
                name = role + "shared."
                add_mlp(spec, source, name, inputs_tD, shared_t, out_tD, self._chunk_tokens)

        if shared_tD is not None:
            count, out_tD = moe.num_experts_per_token, shared_tD
            ids_TK = self._gathered("ids", [ids_tK], count, torch.int64)
            weights_TK = self._gathered("weights", [weights_tK], count, torch.float32)
            inputs_TD = self._gathered(
                "inputs",
                [inputs_tD],
                spec.hidden_size,
                source.dtype,
                lambda: add_shared(out_tD),
            )
        grouped = group_tokens(ids_TK, weights_TK, moe.num_experts, self._host)
        branch_TD = self.x_tD.new_zeros((len(inputs_TD), spec.hidden_size))
        for group in source.expert_groups(layer):
            add_experts(spec, group, inputs_TD, grouped, branch_TD)
        del inputs_TD
        if shared_tD is None:
            add_shared(branch_TD)
            return branch_TD, ids
        branch_tD = self._summed(branch_TD)
        branch_tD += shared_tD
        return branch_tD, ids

    def _routed(
        self, role: str, moe: MoeSpec
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """Of the own tokens: the experts' inputs, the shared gate [t], ids and weights [t, K].

        Router and gate come of inputs that were not rounded, in float32.
        """
        spec, source, x_tD = self._spec, self.source, self.x_tD
        router = needed_dense(source, role + "router").float()
        gate = source.matrix(role + "shared_gate")
        assert gate is None or isinstance(gate, torch.Tensor)
        norm = source.vector(role + "ffn_norm")
        inputs_tD = torch.empty_like(x_tD, dtype=source.dtype)
        logits_tE = x_tD.new_empty((len(x_tD), moe.num_experts))
        shared_t = None if gate is None else x_tD.new_empty(len(x_tD))
        for chunk in tiles(len(x_tD), self._chunk_tokens):
            normed_TD = rms_norm(x_tD[chunk], norm, spec.rms_norm_eps)
            inputs_tD[chunk] = normed_TD
            logits_tE[chunk] = tiled_product(normed_TD, router)
            if gate is not None and shared_t is not None:
                shared_t[chunk] = torch.sigmoid(tiled_product(normed_TD, gate.float())[:, 0])
        if not self.num_own:
            shape = 0, moe.num_experts_per_token
            return (
                inputs_tD,
                shared_t,
                x_tD.new_empty(shape, dtype=torch.int64),
                x_tD.new_empty(shape),
            )
        add_bias(logits_tE, source.vector(role + "router_bias"))
        ids_tK, weights_tK = route(moe, logits_tE, source.vector(role + "router_correction"))
        return inputs_tD, shared_t, ids_tK, weights_tK

    def _gathered(
        self,
        name: str,
        own: list[torch.Tensor],
        width: int,
        dtype: torch.dtype,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> torch.Tensor:
        """[T, width] of all lanes' tokens, in the span's order. ``own``: parts of this lane's.

        ``meanwhile`` asks the device for work that it can do while the others' come.
        """
        device = self.source.device
        own_tW = _joined(own) if own else torch.empty((0, width), dtype=dtype, device=device)
        own_tW = own_tW.contiguous()
        self._exchange.offer(self.number, name, own_tW)
        out_TW = torch.empty((self._num_tokens, width), dtype=dtype, device=device)
        coming = [
            self._exchange.fetch(self.number, lane, name, chunk.own, out_TW[chunk.span])
            for lane in self._others()
            for chunk in self._plan[lane]
        ]
        for chunk in self.chunks:
            out_TW[chunk.span] = own_tW[chunk.own]
        meanwhile()
        for done in coming:
            self._exchange.arrived(self.number, done)
        return out_TW

    def _summed(self, branch_TD: torch.Tensor) -> torch.Tensor:
        """What the experts of all lanes give the own tokens, in the order of the lanes [t, D]."""
        self._exchange.offer(self.number, "branch", branch_TD)
        parts = [torch.empty_like(self.x_tD) for _ in self._plan[1:]]
        coming = [
            self._exchange.fetch(self.number, lane, "branch", chunk.span, part_tD[chunk.own])
            for lane, part_tD in zip(self._others(), parts)
            for chunk in self.chunks
        ]
        for done in coming:
            self._exchange.arrived(self.number, done)
        by_lane = dict(zip(self._others(), parts))
        sum_tD = torch.empty_like(self.x_tD)
        for chunk in self.chunks:
            for lane in range(len(self._plan)):
                own = lane == self.number
                part_TD = branch_TD[chunk.span] if own else by_lane[lane][chunk.own]
                if lane == 0:
                    sum_tD[chunk.own] = part_TD
                else:
                    sum_tD[chunk.own] += part_TD
        return sum_tD

    def _others(self) -> list[int]:
        """The other lanes, each lane beginning behind itself, so that not all read the same one."""
        count = len(self._plan)
        return [(self.number + step) % count for step in range(1, count)]


def _prefix_of(prefix: Prefix, chunk: Chunk, slots_TW: torch.Tensor | None) -> Prefix:
    """What the tokens of a chunk see before their own: the span's first tokens, too."""
    begin = prefix.visible_begin
    if begin is not None:
        begin = begin[chunk.span]
    slots_PW = prefix.slots_PW
    if slots_TW is not None and chunk.span.start:
        before = slots_TW[: chunk.span.start].to(slots_PW.dtype)
        slots_PW = torch.cat([slots_PW, before]) if len(slots_PW) else before
    return Prefix(slots_PW, prefix.unseen, begin)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
