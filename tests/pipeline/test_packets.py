"""KV packets between prefill and decode: recorded, replayed, damaged, held up, cancelled."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest
from oracles import MINI, expected
from packet_record import record

from moechat import SamplingParams
from moechat.errors import PacketRefused
from moechat.kv.channel import Channel
from moechat.kv.packet import PART_TOKENS, KVPacket, native_packet, verify

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_end=True)


def tokens_of(handle):
    return [event.token_id for event in handle if event.token_id is not None]


def test_recorded_packets_replayed_into_a_fresh_decode_worker(
    small_oracle, open_engine, monkeypatch
):
    engine = open_engine(small_oracle)
    ids = expected(small_oracle)["prompt_2_ids"].tolist()
    packets = record(engine, monkeypatch)
    want = tokens_of(engine.session().generate(ids, GREEDY))
    assert [packet.layer for packet in packets] == list(range(engine.spec.num_layers))
    assert all(packet.positions.tolist() == list(range(len(ids) - 1)) for packet in packets)

    fresh = open_engine(small_oracle)
    session = fresh.session()
    for packet in packets:
        assert fresh.decode.channel.send_packet(packet, lambda: False)
    session.timeline.extend(ids)
    deadline = time.monotonic() + 5
    while len(session.cache) < len(ids) - 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    again = record(fresh, monkeypatch)
    assert tokens_of(session.generate([], GREEDY)) == want
    assert again == []  # nothing was prefilled


def test_the_draft_layer_has_a_packet_of_its_own(small_oracle, open_engine, monkeypatch):
    engine = open_engine(small_oracle, speculate=True)
    packets = record(engine, monkeypatch)
    session = engine.session()
    session.extend([1, 2, 3, 4, 5], logits="last")
    assert [packet.layer for packet in packets] == [0, 1, 2]
    assert packets[2].positions.tolist() == [0, 1, 2, 3]  # token 5 is known, its state is not
    assert session.cache.draft.read(0, 0, 4).tobytes() == packets[2].payload[0].tobytes()
    session.rewind(0)
    packets.clear()
    session.extend([1, 2, 3, 4, 5], logits=None)
    assert packets[2].positions.tolist() == [0, 1, 2, 3]
    session.rewind(3)
    assert session.cache.draft.num_slots(0) == 2  # position 2 needs the token at 3
    session.rewind(0)
    packets.clear()
    session.extend([1], logits=None)
    assert [packet.layer for packet in packets] == [0, 1]

    other = open_engine(small_oracle).session()
    stray = native_packet(other.cache.session, 0, 2, np.array([0], np.int32), packets[0].payload[0])
    other.engine.decode.channel.send_packet(stray, lambda: False)
    with pytest.raises(PacketRefused):
        other.extend([1], logits=None)


def test_one_flipped_byte_is_refused(small_oracle, open_engine, monkeypatch):
    engine = open_engine(small_oracle)
    session = engine.session()
    send = engine.decode.channel.send_packet

    def flip(packet, cancelled):
        packet.payload[0].view(np.uint8)[3, 5] ^= 1
        return send(packet, cancelled)

    monkeypatch.setattr(engine.decode.channel, "send_packet", flip)
    with pytest.raises(PacketRefused, match="checksum"):
        session.extend([1, 2, 3, 4, 5], logits="last")
    monkeypatch.undo()
    assert len(session) == 0
    assert session.extend([1, 2, 3, 4, 5], logits="last").shape == (1, 320)


@pytest.mark.parametrize("field", ["version", "session", "epoch", "layer"])
def test_the_checksum_covers_the_header(field):
    packet = native_packet(1, 2, 3, np.arange(4, dtype=np.int32), np.ones((4, 8), np.uint16))
    verify(packet)
    object.__setattr__(packet, field, 99)
    with pytest.raises(PacketRefused):
        verify(packet)


def test_a_stale_packet_is_dropped(small_oracle, open_engine):
    engine = open_engine(small_oracle)
    session = engine.session()
    session.extend([1, 2, 3], logits=None)
    rows = session.cache.read(0, 0, 1)
    stale = native_packet(
        session.cache.session, session.cache.epoch - 1, 0, np.array([3], np.int32), rows
    )
    engine.decode.channel.send_packet(stale, lambda: False)
    assert session.extend([4], logits="last").shape == (1, 320)
    assert len(session.cache) == 4


@pytest.mark.parametrize("threads", [1, 2])
def test_a_channel_of_one_packet_does_not_deadlock(small_oracle, open_engine, threads):
    engine = open_engine(small_oracle, channel_packets=1, threads=threads)
    handles = [engine.session().generate([1, 2, 3 + i] * 20, GREEDY) for i in range(3)]
    assert all(len(tokens_of(handle)) == 20 for handle in handles)


def test_cancel_while_the_channel_is_full(open_engine, monkeypatch):
    engine = open_engine(MINI, channel_packets=1)
    full, release = threading.Event(), threading.Event()
    receive = engine.decode.channel.receive

    def slow(block):
        message = receive(block)
        if isinstance(message, KVPacket) and message.layer == 0:
            full.set()
            release.wait(5)  # the decode thread is held: the next packets fill the channel
        return message

    monkeypatch.setattr(engine.decode.channel, "receive", slow)
    session = engine.session()
    handle = session.generate([5] * 200, GREEDY)
    assert full.wait(5)
    time.sleep(0.2)
    started = time.monotonic()
    handle.cancel()
    release.set()
    *_, last = handle
    assert time.monotonic() - started < 0.3
    assert last.finish_reason == "cancelled"
    assert len(session.cache) == 0


def test_a_full_channel_blocks_only_packets():
    channel = Channel(capacity=1)
    packet = native_packet(0, 0, 0, np.zeros(1, np.int32), np.zeros((1, 4), np.uint16))
    assert channel.send_packet(packet, lambda: False)
    channel.send("control")
    cancelled = threading.Event()
    sent = []
    thread = threading.Thread(
        target=lambda: sent.append(channel.send_packet(packet, cancelled.is_set))
    )
    thread.start()
    cancelled.set()
    channel.wake()
    thread.join(2)
    assert sent == [False]
    assert channel.receive(block=False) is packet
    assert channel.receive(block=False) == "control"
    assert channel.receive(block=False) is None


def test_a_reader_that_pauses_does_not_hold_up_another_sessions_prompt(open_engine):
    engine = open_engine(MINI, channel_packets=1)
    paused = engine.session().generate([5] * 8, SamplingParams(max_tokens=500, ignore_end=True))
    time.sleep(0.3)  # its queue of tokens is full by now
    session = engine.session()
    session.extend([7] * (3 * PART_TOKENS), logits=None)
    assert len(session.cache) == 3 * PART_TOKENS
    assert len(tokens_of(paused)) == 500


def test_parts_of_packets_wait_for_steps_that_run(open_engine, monkeypatch):
    """Beside an answer at most one part of a packet is handled between two steps if it is slow."""
    engine = open_engine(MINI)
    order: list[str] = []
    apply_part, generate = engine.decode._apply_part, engine.decode._generate

    def slow_part(session, parts):
        order.append("part")
        time.sleep(0.02)
        apply_part(session, parts)

    def stepping(max_steps):
        order.append("steps")
        generate(max_steps)

    answer = engine.session().generate([5] * 8, SamplingParams(max_tokens=3000, ignore_end=True))
    next(answer)
    monkeypatch.setattr(engine.decode, "_apply_part", slow_part)
    monkeypatch.setattr(engine.decode, "_generate", stepping)
    drain = threading.Thread(target=lambda: list(answer))
    drain.start()
    session = engine.session()
    session.extend([7] * (2 * PART_TOKENS), logits=None)
    answer.cancel()
    drain.join()
    ends = 1  # a call that finds no part any more
    assert order.count("part") == (2 + ends) * engine.spec.num_layers
    assert all(a != b for a, b in itertools.pairwise(order) if a == "part")
    assert len(session.cache) == 2 * PART_TOKENS
