"""Cancelled at any stage of the KV path, a request leaves nothing behind."""

from __future__ import annotations

import gc
import os
import random
import threading
from pathlib import Path

import numpy as np
import pytest
from oracles import MINI

from moechat import SamplingParams
from moechat.kv.policy import make_policy

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_end=True)
POLICIES = ["native", "int4", "spectrum", "pdtrim", "snapkv"]
STAGES = ["layer", "tiers", "send", "arrival", "token", "time"]


def tokens_of(handle):
    return [event.token_id for event in handle if event.token_id is not None]


def resident_bytes():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Interception:
    """Cancels the session at a stage of a layer."""

    def __init__(self, engine, monkeypatch):
        self.stage, self.layer, self.session = "", 0, None
        channel = engine.decode.channel
        send, receive = channel.send_packet, channel.receive

        def send_packet(packet, cancelled):
            self.reached("send", packet.layer)
            return send(packet, cancelled)

        def receive_any(block):
            message = receive(block)
            self.reached("arrival", getattr(message, "layer", -1))
            return message

        monkeypatch.setattr(channel, "send_packet", send_packet)
        monkeypatch.setattr(channel, "receive", receive_any)

    def reached(self, stage, layer):
        if (stage, layer) == (self.stage, self.layer):
            self.stage = ""
            self.session.cancel()


class Watched:
    """A policy that tells when it is asked."""

    def __init__(self, policy, interception):
        self.policy, self.interception = policy, interception
        self.name, self.window, self.centre_keys = policy.name, policy.window, policy.centre_keys

    def tiers(self, layer, first_position, num_tokens, mass_n=None):
        self.interception.reached("tiers", layer)
        return self.policy.tiers(layer, first_position, num_tokens, mass_n)


@pytest.mark.parametrize("channel_packets", [1, 8])
def test_random_cancels_leave_nothing_behind(channel_packets, open_engine, monkeypatch):
    engine = open_engine(MINI, channel_packets=channel_packets)
    layout, layers = engine.kv_policy.layout, engine.spec.num_layers
    draw = random.Random(channel_packets)
    interception = Interception(engine, monkeypatch)
    prompt = np.random.default_rng(0).integers(3, engine.spec.vocab_size, 120).tolist()
    policies = {name: make_policy(name, 0.3, layout) for name in POLICIES}

    def answer(name):
        engine.kv_policy = policies[name]
        return tokens_of(engine.session().generate(prompt, GREEDY))

    want = {name: answer(name) for name in POLICIES}

    def cancelled_request():
        name, stage = draw.choice(POLICIES), draw.choice(STAGES)
        session = engine.session()
        before = draw.choice([0, 40])
        engine.kv_policy = policies[name]
        session.extend(prompt[:before], logits=None)
        interception.session, interception.layer = session, draw.randrange(layers)
        engine.kv_policy = Watched(policies[name], interception)
        interception.stage = stage
        timer = threading.Timer(draw.uniform(0, 0.06), session.cancel)
        handle = session.generate(prompt[before:], GREEDY)
        if stage == "time":
            timer.start()
        for event in handle:
            if stage == "layer" and getattr(event, "layers_done", -1) == interception.layer + 1:
                handle.cancel()
            if stage == "token" and event.token_id is not None:
                handle.cancel()
        timer.cancel()
        reason = event.finish_reason
        if stage != "time":
            # What is seen only after the last token may come too late.
            assert reason in ("cancelled", "length"), stage
        interception.stage = ""
        return reason, session, name

    reasons = []
    threads, descriptors, memory = 0, 0, 0
    for turn in range(100):
        reason, session, name = cancelled_request()
        reasons.append(reason)
        assert len(session.cache) <= len(session)
        assert all(session.cache.num_tokens(i) == len(session.cache) for i in range(layers))
        if turn % 10 == 0:
            assert answer(name) == want[name]
        if turn % 20 == 19:  # the cancelled talk itself goes on as another one does
            session.rewind(0)
            engine.kv_policy = policies[name]
            assert tokens_of(session.generate(prompt, GREEDY)) == want[name]
        del session
        if turn == 30:
            threads = threading.active_count()
            descriptors = len(os.listdir("/proc/self/fd"))
            memory = resident_bytes()
    assert reasons.count("cancelled") > 60
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    kv_bytes = 128 * engine.spec.num_layers * 2 * layout.width
    assert resident_bytes() - memory < 20 * kv_bytes  # 70 requests' KV would be 70 of these
    assert engine.decode.channel.receive(block=False) is None
