"""One span of new tokens on its way through the layers, on whatever device it is computed.

Shapes: T new tokens, D hidden, W elements a slot, n keys, K experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moechat import _native
from moechat.kv.cache import KVCache


@dataclass(frozen=True)
class LayerOutput:
    """What one layer leaves behind."""

    kv_TW: NDArray[Any]  # in the cache's own type
    window_mass_n: NDArray[np.float32] | None
    router_ids_TK: NDArray[np.int32]  # [T, 0] for a dense layer


@dataclass(frozen=True)
class SpanFigures:
    """What a span took of a link, in bytes and seconds; nothing on the CPU, whose weights stay."""

    streamed_bytes: int = 0
    stream_seconds: float = 0.0  # of the copies, which run beside computing
    wait_seconds: float = 0.0  # computing waited for them
    attention: str = ""  # the kernels that did it, by name


class PrefillSpan(Protocol):
    """New tokens after those that a cache holds; layers run in order, each once."""

    def run_layer(self, cancel: _native.CancelFlag, window: int = 0) -> LayerOutput | None:
        """Run the next layer; None when ``cancel`` cut it.

        With ``window`` > 0 also the attention that the last ``window`` tokens give to every key.
        """

    def logits(self, cancel: _native.CancelFlag, first: int) -> NDArray[np.float32] | None:
        """Logits [T - first, vocab] of the tokens from ``first`` on, after the last layer."""

    def draft(
        self, next_id: int | None, cancel: _native.CancelFlag
    ) -> tuple[NDArray[np.int32], NDArray[Any]] | None:
        """The draft layer's positions and slots, or None; after the last layer, spends the span."""

    @property
    def hidden_TD(self) -> NDArray[np.float32]:
        """The residual stream after the layer that ran last."""

    def figures(self) -> SpanFigures:
        """What it took; waits for what is under way. Asked for once, in the end."""


class PrefillDevice(Protocol):
    """What makes spans. One of its spans runs at a time, all on one thread."""

    name: str  # for people: "cpu", "cuda:0"
    max_tokens: int | None  # the longest span; None: any
    resumable: bool  # a span that is cut between layers can be gone on with
    pass_bytes: int  # that cross a link for one span, however short; 0: nothing does

    def span(
        self,
        cache: KVCache,
        ids: list[int],
        *,
        start_layer: int = 0,
        hidden_TD: NDArray[np.float32] | None = None,
    ) -> PrefillSpan:
        """``ids`` after the tokens of ``cache``.

        With ``start_layer`` and ``hidden_TD`` from there on, if the device is resumable.
        """
