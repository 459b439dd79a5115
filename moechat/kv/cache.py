"""One session's KV cache, as the decode worker writes it and a prefill job reads it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moechat import _native
from moechat.errors import PacketRefused
from moechat.kv.layout import KVLayout
from moechat.kv.packet import KVPacket, decode_packet, decode_parts, native_packet
from moechat.models.spec import ModelSpec

PAGE_SLOTS = 64  # kPageSlots of cpp/kv/cache.h


@dataclass(frozen=True)
class LayerSlots:
    """Slots of one layer, for a snapshot.

    ``packet`` is all NATIVE, of session and epoch 0. ``first_slot``: the number of its first slot,
    a multiple of PAGE_SLOTS; slots before left the sliding window. Positions from ``begin`` below
    ``end`` have a slot or were dropped. ``aside``: what was kept of slots that left, for a rewind
    to where the last answer began.
    """

    packet: KVPacket
    first_slot: int
    begin: int
    end: int
    aside: LayerSlots | None = None


class KVCache:
    """Slots of every layer in the compute type. Only the decode worker calls apply and truncate.

    A policy may drop tokens on their way here, each layer others: their slots are absent, and slot
    and position differ. A token counts as cached when its KV has crossed, kept or dropped; a rewind
    does not bring back what was dropped before it.
    A layer with a sliding window keeps its window and some slack, and forgets older slots while
    decode steps.
    ``epoch`` is raised whenever packets that may be on their way have become worthless.

    ``draft`` is the cache of the multi-token-prediction layer, None without speculation. Its slot
    of position i was made from the hidden state at i and the token at i + 1. Positions may be
    missing there: that costs hits, no correctness. Packets call it layer ``num_layers``.
    """

    def __init__(
        self, session: int, spec: ModelSpec, compute: str, *, speculate: bool = False
    ) -> None:
        self.session = session
        self.epoch = 0
        self.num_layers = spec.num_layers
        self.layout, self.compute = KVLayout.of(spec), compute
        self.arrived_bytes = 0  # payload, scales and centres of all packets that were applied
        self.decode_seconds = 0.0  # spent on checking and decoding them
        self.marked = 0  # where the last answer began
        self.windows = tuple(layer.window for layer in spec.layers)
        self.native = _native.KVCache(self.windows, spec.kv_width, compute, spec.kv_segments)
        self.draft = (
            _native.KVCache([0], spec.kv_width, compute, spec.kv_segments) if speculate else None
        )

    def __len__(self) -> int:
        """Tokens of the timeline whose KV has crossed, kept or dropped, in every layer."""
        return self.num_tokens(self.num_layers - 1)

    def num_tokens(self, layer: int) -> int:
        """Tokens whose KV has crossed in one layer; layers differ while packets are on their way.

        A sliding window may have let go of the oldest.
        """
        return self.native.end_position(layer)

    def num_slots(self, layer: int) -> int:
        """The end of one layer's slots: fewer than tokens once a policy has dropped some."""
        return self.native.num_slots(layer)

    def first_slot(self, layer: int) -> int:
        """The oldest slot that one layer still holds."""
        return self.native.first_slot(layer)

    def holds(self, position: int) -> bool:
        """Whether exactly the tokens below ``position`` have crossed, in every layer."""
        return all(self.num_tokens(layer) == position for layer in range(self.num_layers))

    def read(self, layer: int, begin: int, end: int) -> NDArray[Any]:
        """Slots [begin, end) of a layer as [slots, width]: uint16 (BF16 bits) or float32."""
        return self.native.read(layer, begin, end)

    def apply(self, packet: KVPacket) -> bool:
        """Append a packet's slots; False when it is stale. Raises PacketRefused when it is bad."""
        if packet.session != self.session or packet.epoch != self.epoch:
            return False
        for _ in self.apply_parts(packet):
            pass
        return True

    def apply_parts(self, packet: KVPacket) -> Iterator[None]:
        """``apply`` with a pause after every part, so that others need not wait for the whole."""
        if packet.session != self.session or packet.epoch != self.epoch:
            return
        started = time.perf_counter()
        for positions, rows in decode_parts(packet, self.layout, self.compute):
            self.decode_seconds += time.perf_counter() - started
            self._append(packet.layer, positions, rows)
            yield
            started = time.perf_counter()
        self.arrived_bytes += packet.num_bytes

    def _append(self, packet_layer: int, positions: NDArray[np.int32], rows: NDArray[Any]) -> None:
        native, layer = self._place(packet_layer)
        try:
            if positions[0] < native.end_position(layer):
                raise PacketRefused(
                    f"a KV packet of layer {packet_layer} was refused",
                    "its positions are held already",
                )
            native.append(layer, positions, rows)
        except _native.NativeError as error:
            raise PacketRefused("a KV packet was refused", str(error.args[1])) from error

    def settle(self) -> None:
        """Let go of what left the sliding windows: all packets of a prefill have arrived."""
        self.native.settle()

    def mark(self, position: int) -> None:
        """An answer begins at ``position``: a rewind to there stays possible with any window."""
        self.marked = position
        self.native.mark(position)

    def truncate(self, position: int) -> None:
        """Keep the slots of positions below ``position``; what is on its way becomes stale.

        What a policy dropped of the tokens before stays dropped. Past a sliding window's slack
        nothing is kept, unless it goes back to where the last answer began: then the timeline is
        prefilled again.
        """
        self.epoch += 1
        self.native.truncate(position)
        if self.draft is not None:
            self.draft.truncate(max(position - 1, 0) if len(self) else 0)

    def reaches(self, position: int) -> bool:
        """Whether truncate(position) would change anything."""
        if any(self.num_tokens(layer) > position for layer in range(self.num_layers)):
            return True
        return self.draft is not None and self.draft.end_position(0) > max(position - 1, 0)

    def positions(self, layer: int) -> NDArray[np.int32]:
        """Positions of all slots that a layer holds."""
        return _positions(self.native, layer)

    def slots(self, layer: int) -> LayerSlots:
        """A copy of what a layer holds; layer ``num_layers`` is the draft layer's."""
        native, number = self._place(layer)

        def copy(end_slot: int, aside: LayerSlots | None = None, *, kept: bool) -> LayerSlots:
            first_slot, begin, end = native.place(number, kept)
            positions = native.positions(number, first_slot, end_slot)
            packet = native_packet(
                0, 0, layer, positions, native.read(number, first_slot, end_slot)
            )
            return LayerSlots(packet, first_slot, begin, end, aside)

        count, aside = native.num_aside_slots(number), None
        if count:
            aside = copy(native.place(number, True)[0] + count, kept=True)
        return copy(native.num_slots(number), aside, kept=False)

    def restore(
        self, layers: Sequence[LayerSlots], draft: LayerSlots | None, marked: int
    ) -> Iterator[None]:
        """Make this cache, which is new, equal to the one that the slots and the mark are of.

        Yields after each layer. Raises PacketRefused for a packet that does not belong here; that
        the rest is plausible was checked by the caller. ``draft`` may be None, or of no use here.
        """
        given = [*layers, *([draft] if draft is not None and self.draft is not None else [])]
        for layer, slots in enumerate(given):
            native, number = self._place(layer)
            for part, aside in ((slots, False), (slots.aside, True)):
                if part is not None:
                    place = part.first_slot, part.begin, part.end
                    positions, rows = decode_packet(part.packet, self.layout, self.compute)
                    native.restore(number, place, positions, rows, aside)
            yield
        self.mark(marked)

    def _place(self, layer: int) -> tuple[_native.KVCache, int]:
        """Cache and number there of a layer."""
        if layer == self.num_layers and self.draft is not None:
            return self.draft, 0
        return self.native, layer


def _positions(cache: _native.KVCache, layer: int) -> NDArray[np.int32]:
    return cache.positions(layer, cache.first_slot(layer), cache.num_slots(layer))
