"""Prefill on torch devices, layer by layer: each weight comes once a prompt, whatever its length.

The same definition as cpp/prefill: float32 residual stream, norms, router, softmax and sums; only
matrix inputs and the KV cache are BF16, or nothing in exact mode. Shapes: T new tokens, D hidden,
P cached slots, W elements of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found, unused-ignore]
from numpy.typing import NDArray

from moechat import _native
from moechat.errors import NonFiniteLogits
from moechat.gpu_weights.products import product, rms_norm, softcap, tile_rows, tiles
from moechat.kv.cache import KVCache
from moechat.models.spec import ModelSpec
from moechat.prefill.cpu import LayerOutput
from moechat.prefill.gpu.attention import Backend
from moechat.prefill.gpu.exchange import Exchange, Routes
from moechat.prefill.gpu.lane import Lane, LaneOutput
from moechat.prefill.gpu.lanes import current, run_lanes, zigzag
from moechat.prefill.gpu.prefix import Prefix, read_prefix
from moechat.prefill.gpu.source import LayerSource, needed_dense

_HOST = torch.device("cpu")


class StreamPrefill:
    """One span of new tokens after those that ``cache`` already holds, as CpuPrefill.

    ``sources``: one, or one for each device, its share of the experts in it and all else; experts
    of all make the model, and each device is a lane. ``routes``: on which lanes exchange what they
    do, of one span at a time; None: new ones.

    ``chunk_tokens``: how many tokens' wide activations are held at once, rounded up to whole tiles
    of a product; no bit of the result depends on it. ``cache`` must be of the source's type.
    With ``start_layer`` and ``hidden_TD``, another span's at its ``next_layer``, it goes on from
    there, with the same bits if it has as many lanes. ValueError for ids that the model does not
    have.
    """

    def __init__(
        self,
        spec: ModelSpec,
        sources: LayerSource | Sequence[LayerSource],
        cache: KVCache,
        ids: Sequence[int],
        *,
        chunk_tokens: int = 8192,
        start_layer: int = 0,
        hidden_TD: NDArray[np.float32] | None = None,
        routes: Routes | None = None,
    ) -> None:
        sources = list(sources) if isinstance(sources, Sequence) else [sources]
        tokens = np.array(ids, np.int64)
        if not tokens.size or tokens.min() < 0 or tokens.max() >= spec.vocab_size:
            raise ValueError("a prefill needs at least one token, and ids of the vocabulary")
        if any((cache.compute == "exact") != (one.dtype == torch.float32) for one in sources):
            raise ValueError(f"the cache is of mode {cache.compute}, the weights are not")
        if chunk_tokens < 1:
            raise ValueError("chunk_tokens must be positive")
        if not 0 <= start_layer <= spec.num_layers or (start_layer > 0) != (hidden_TD is not None):
            raise ValueError("a start between layers needs the layer's number and hidden states")
        if hidden_TD is not None and hidden_TD.shape != (len(tokens), spec.hidden_size):
            raise ValueError("the hidden states are not those of these tokens")
        self._spec, self._cache, self._tokens = spec, cache, tokens
        self._first_position = len(cache)
        self._prefix_slots = [cache.native.num_slots(layer) for layer in range(spec.num_layers)]
        self._exchange = Exchange([one.device for one in sources], routes)
        plan = zigzag(len(tokens), len(sources))
        self._lanes = [
            Lane(
                number,
                plan,
                spec,
                source,
                self._exchange,
                first_position=self._first_position,
                num_tokens=len(tokens),
                chunk_tokens=_whole_tiles(chunk_tokens, source.device),
            )
            for number, source in enumerate(sources)
        ]
        self._layer, self._spent = start_layer, False
        self._started = hidden_TD is not None
        self._unchecked: list[LaneOutput] = []  # of the last layer: whether it is finite
        if hidden_TD is not None:
            for lane in self._lanes:
                lane.start_from(hidden_TD)
        self.attention_backends: list[Backend] = []  # of each layer that has run

    def run_layer(self, cancel: _native.CancelFlag, window: int = 0) -> LayerOutput | None:
        """Run the next layer; None when ``cancel`` is raised, and the span stays where it is.

        A layer is not cut once it began. With ``window`` > 0 also the attention that the last
        ``window`` tokens give to every key. The device may still be at the experts when this
        returns, but after the last layer. Raises NonFiniteLogits, naming the layer, which may be
        the one before; the span is then spent, as after any other error.
        """
        if window < 0:
            raise ValueError("the window cannot be negative")
        if self._spent or self._layer >= self._spec.num_layers:
            raise ValueError("all layers have run, or one of them failed")
        if cancel.raised:
            return None
        layer, self._spent = self._layer, True  # unless all goes well
        with torch.inference_mode():
            output = self._run_layer(layer, window)
        self._layer, self._spent = layer + 1, False
        return output

    def logits(self, cancel: _native.CancelFlag, first: int) -> NDArray[np.float32] | None:
        """Logits [T - first, vocab] of the tokens from ``first`` on, after the last layer."""
        if self._spent or self._layer < self._spec.num_layers:
            raise ValueError("logits come after the last layer")
        if not 0 <= first < len(self._tokens):
            raise ValueError("the first token is outside the span")
        spec, source = self._spec, self._lanes[0].source
        with current(source.device):
            head = source.matrix("head")
        if head is None:
            head = needed_dense(source, "embedding").to(source.dtype)
        out = np.empty((len(self._tokens) - first, spec.vocab_size), np.float32)
        norm = source.vector("final_norm")
        with current(source.device), torch.inference_mode():
            for rows in tiles(len(out), tile_rows(source.device)):
                if cancel.raised:
                    return None
                x = self._hidden_on(slice(first + rows.start, first + rows.stop), source.device)
                scores = product(rms_norm(x, norm, spec.rms_norm_eps), head)
                out[rows] = softcap(scores, spec.final_softcap).cpu().numpy()
        if not np.isfinite(out).all():
            raise _non_finite("the output head")
        return out

    def draft(self, next_id: int | None, cancel: _native.CancelFlag) -> None:
        """None: the draft layer is not streamed. Positions that it lacks cost hits alone."""
        self._spent = True

    @property
    def next_layer(self) -> int:
        """How many layers have run, those before ``start_layer`` included."""
        return self._layer

    @property
    def hidden_TD(self) -> NDArray[np.float32]:
        """The residual stream on its way to ``next_layer``, in host memory.

        Waits for the device. ValueError before the first layer has run.
        """
        if not self._started:
            raise ValueError("no layer has run")
        hidden = self._hidden_on(slice(0, len(self._tokens)), _HOST)
        return np.array(hidden.numpy())

    def _run_layer(self, layer: int, window: int) -> LayerOutput:
        prefix = read_prefix(
            self._cache,
            layer,
            self._prefix_slots[layer],
            self._first_position,
            len(self._tokens),
        )
        if not self._started:
            for lane in self._lanes:
                lane.embed(self._tokens)
            self._started = True
        tasks: list[Callable[[], LaneOutput]] = [
            partial(lane.run_layer, layer, prefix, window) for lane in self._lanes
        ]
        try:
            outputs = run_lanes(tasks, self._exchange.stop)
        finally:
            self._exchange.end_layer()
        self._check(layer - 1)
        self._unchecked = outputs
        if layer == self._spec.num_layers - 1:
            self._check(layer)
        self.attention_backends += [one.backend for one in outputs if one.backend][:1]
        return self._assembled(layer, prefix, outputs, window)

    def _check(self, layer: int) -> None:
        """Raises when what the last layer left is not finite."""
        for output in self._unchecked:
            if output.finite is not None and not output.finite.wait():
                raise _non_finite(f"model.layers.{layer}")
        self._unchecked = []

    def _assembled(
        self, layer: int, prefix: Prefix, outputs: list[LaneOutput], window: int
    ) -> LayerOutput:
        """What the lanes have, in the order of the tokens, in memory of its own."""
        num_tokens, moe = len(self._tokens), self._spec.moe
        experts = moe.num_experts_per_token if moe and self._spec.layers[layer].moe else 0
        ids_TK = np.empty((num_tokens, experts), np.int32)
        slots_TW: NDArray[Any] | None = None
        masses = {}
        for lane, output in zip(self._lanes, outputs):
            own_slots = output.slots_tW.wait() if output.slots_tW else None
            own_ids = output.ids_tK.wait() if output.ids_tK else None
            for chunk, mass in zip(lane.chunks, output.masses):
                assert own_slots is not None
                if slots_TW is None:
                    slots_TW = np.empty((num_tokens, own_slots.shape[1]), own_slots.dtype)
                slots_TW[chunk.span] = own_slots[chunk.own]
                if own_ids is not None:
                    ids_TK[chunk.span] = own_ids[chunk.own]
                if mass is not None:
                    masses[chunk.span.start] = mass.wait()
        assert slots_TW is not None
        mass_n = None
        if window:  # slots that no token sees have none
            mass_n = np.zeros(prefix.unseen + len(prefix.slots_PW) + num_tokens, np.float32)
            for _, part in sorted(masses.items()):
                mass_n[prefix.unseen :][: len(part)] += part
        return LayerOutput(slots_TW, mass_n, ids_TK)

    def _hidden_on(self, rows: slice, device: torch.device) -> torch.Tensor:
        """The residual stream of some tokens on one device."""
        parts = []
        chunks = ((lane, chunk) for lane in self._lanes for chunk in lane.chunks)
        for lane, chunk in sorted(chunks, key=lambda pair: pair[1].span.start):
            begin = max(rows.start, chunk.span.start) - chunk.span.start
            end = min(rows.stop, chunk.span.stop) - chunk.span.start
            if begin < end:
                part = lane.x_tD[chunk.own][begin:end]
                # Between GPUs by way of the host: the driver's own ways may be forbidden.
                parts.append(part if part.device == device else part.cpu().to(device))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _whole_tiles(chunk_tokens: int, device: torch.device) -> int:
    tile = tile_rows(device)
    return -(-chunk_tokens // tile) * tile


def _non_finite(where: str) -> NonFiniteLogits:
    return NonFiniteLogits(f"the logits hold NaN or infinity; the first bad values leave {where}")
