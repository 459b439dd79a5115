"""One session's KV cache, as the decode worker writes it and a prefill job reads it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moechat import _native
from moechat.errors import PacketRefused
from moechat.kv.packet import TIER_NATIVE, KVPacket, verify


class KVCache:
    """Slots of every layer in the compute type. Only the decode worker calls apply and truncate.

    ``epoch`` is raised whenever packets that may be on their way have become worthless.
    """

    def __init__(self, session: int, num_layers: int, width: int, compute: str) -> None:
        self.session = session
        self.epoch = 0
        self.num_layers = num_layers
        self.native = _native.KVCache(num_layers, width, compute)

    def __len__(self) -> int:
        """Slots that every layer holds."""
        return self.native.num_slots(self.num_layers - 1)

    def num_slots(self, layer: int) -> int:
        """Slots that one layer holds; layers differ only while packets are on their way."""
        return self.native.num_slots(layer)

    def holds(self, position: int) -> bool:
        """Whether every layer holds exactly the slots below ``position``."""
        return all(self.num_slots(layer) == position for layer in range(self.num_layers))

    def read(self, layer: int, begin: int, end: int) -> NDArray[Any]:
        """Slots [begin, end) of a layer as [slots, width]: uint16 (BF16 bits) or float32."""
        return self.native.read(layer, begin, end)

    def apply(self, packet: KVPacket) -> bool:
        """Append a packet's slots; False when it is stale. Raises PacketRefused when it is bad."""
        if packet.session != self.session or packet.epoch != self.epoch:
            return False
        verify(packet)
        rows = packet.payload[TIER_NATIVE]
        held = self.positions(packet.layer)
        if len(held) and packet.positions[0] <= held[-1]:
            raise PacketRefused(
                f"a KV packet of layer {packet.layer} was refused", "its positions are held already"
            )
        try:
            self.native.append(packet.layer, packet.positions, rows)
        except _native.NativeError as error:
            raise PacketRefused("a KV packet was refused", str(error.args[1])) from error
        return True

    def truncate(self, position: int) -> None:
        """Keep the slots of positions below ``position``; whatever is on its way becomes stale."""
        self.epoch += 1
        self.native.truncate(position)

    def positions(self, layer: int) -> NDArray[np.int32]:
        """Positions of all slots of a layer."""
        return self.native.positions(layer, 0, self.native.num_slots(layer))
