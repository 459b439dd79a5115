"""What a layer's tokens see of the cached tokens before them.

Shapes: P slots of the prefix that are seen, T new tokens, W elements of a slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found, unused-ignore]
from numpy.typing import NDArray

from moechat.kv.cache import KVCache


@dataclass(frozen=True)
class Prefix:
    """The slots before a span, in one layer.

    ``slots_PW``: in host memory in the cache's type, so that BF16 crosses the link; on a lane's
    device float32. ``unseen``: slots before these that no token sees.
    ``visible_begin`` (int64 [T], host memory): the first of the P + T keys that each new token
    sees; None without a window.
    """

    slots_PW: torch.Tensor
    unseen: int
    visible_begin: torch.Tensor | None


def read_prefix(
    cache: KVCache,
    layer: int,
    num_slots: int,
    first_position: int,
    num_tokens: int,
) -> Prefix:
    """Of the first ``num_slots`` of a layer; the span begins at ``first_position``.

    Positions rise with the slots, but need not be all there: what a policy dropped is absent.
    ValueError when the cache has let go of what the span sees.
    """
    window, native = cache.windows[layer], cache.native
    first_slot, begin_position, _ = native.place(layer)
    needed = max(0, first_position - window + 1) if window else 0
    if native.num_slots(layer) < num_slots or begin_position > needed:
        raise ValueError("the cache no longer holds what the span follows")
    held = native.positions(layer, first_slot, num_slots)
    visible_begin, skipped = None, 0
    if window:
        ends = first_position + np.arange(num_tokens) - window  # the last position left out
        begins = np.searchsorted(held, ends, side="right")
        skipped = int(begins[0])
        own = np.arange(num_tokens) - window + 1
        begins = np.where(own >= 0, len(held) + own, begins) - skipped
        visible_begin = torch.from_numpy(begins.astype(np.int64))
    unseen = first_slot + skipped
    return Prefix(_floats(native.read(layer, unseen, num_slots)), unseen, visible_begin)


def _floats(slots: NDArray[Any]) -> torch.Tensor:
    """The cache's own type as torch's: uint16 holds the bits of BF16."""
    if slots.dtype == np.uint16:
        return torch.from_numpy(slots.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(slots)
