"""What prefill sends to decode, kept for a test."""

from __future__ import annotations

import copy


def record(engine, monkeypatch):
    """Copies of all packets that the engine's prefill sends from now on."""
    packets = []
    send = engine.decode.channel.send_packet

    def recording(packet, cancelled):
        packets.append(copy.deepcopy(packet))
        return send(packet, cancelled)

    monkeypatch.setattr(engine.decode.channel, "send_packet", recording)
    return packets
