"""The KV path with every policy: bytes, what they do to the logits, damage, staleness, talks."""

from __future__ import annotations

import numpy as np
import pytest
from kv_policies import ByLayer
from oracles import MINI, oracle_folder
from packet_record import record

from moechat import SamplingParams, _native
from moechat.errors import BadParameter, PacketRefused
from moechat.kv.auto import StageRates, measure_codec, pays
from moechat.kv.policy import NAMES, make_policy
from moechat.kv.tiers import Tier, bytes_per_token
from moechat.prefill.cpu import CpuPrefill

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_end=True)


def tokens_of(handle):
    return [event.token_id for event in handle if event.token_id is not None]


def random_ids(engine, count, seed=1):
    return np.random.default_rng(seed).integers(3, engine.spec.vocab_size, count).tolist()


def prose_ids(engine, count=400):
    text = "Clara keeps the code of the archive in a blue book. Her brother reads it aloud. "
    ids = engine.text.tokenizer.encode(text * 40)
    assert len(ids) >= count
    return ids[:count]


def sent_bytes(packets):
    parts = [part for packet in packets for part in (packet.payload, packet.scales)]
    centres = sum(packet.centre.nbytes for packet in packets)
    return centres + sum(array.nbytes for part in parts for array in part.values())


def test_native_is_what_prefill_computed_bit_for_bit(pipeline_oracle, open_engine):
    engine = open_engine(pipeline_oracle)
    ids = random_ids(engine, 100)
    session, empty = engine.session(), engine.session()
    session.extend(ids, logits=None)
    span, cancel = CpuPrefill(engine.model.native, engine.pool, empty.cache, ids), None
    cancel = _native.CancelFlag()
    for layer in range(engine.spec.num_layers):
        output, cache = span.run_layer(cancel), session.cache
        first, end = cache.first_slot(layer), cache.num_slots(layer)
        assert end == 100
        assert cache.read(layer, first, end).tobytes() == output.kv_TW[first:].tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_bytes_sent_are_bytes_reported(name, pipeline_oracle, open_engine, monkeypatch):
    if name == "k8v4" and "deepseek" in pipeline_oracle.name:
        with pytest.raises(BadParameter):  # latent attention has no values
            open_engine(pipeline_oracle, kv=name)
        return
    engine = open_engine(pipeline_oracle, kv=name, kv_budget=0.4)
    packets, session = record(engine, monkeypatch), engine.session()
    session.extend(random_ids(engine, 90), logits=None)
    *_, last = session.generate(random_ids(engine, 50), GREEDY)
    layers, layout = engine.spec.num_layers, session.cache.layout
    first, second = packets[:layers], packets[layers:]
    assert last.stats.kv_bytes == sent_bytes(second)
    assert session.last_stats == last.stats
    assert last.stats.kv_native_bytes == layers * 49 * 2 * layout.width
    assert session.cache.arrived_bytes == sent_bytes(packets)
    assert last.stats.kv_encode_seconds > 0
    assert last.stats.kv_decode_seconds > 0
    if name in ("native", "fp16", "int8", "int4", "k8v4"):
        tier = Tier[name.upper()]
        assert sent_bytes(first) == layers * 90 * bytes_per_token(layout, tier)
    else:
        within = bytes_per_token(layout, Tier.FP16) * layers
        assert sent_bytes(first) <= 0.4 * layers * 90 * 2 * layout.width + within


def test_an_extend_tells_its_bytes_too(small_oracle, open_engine, monkeypatch):
    engine = open_engine(small_oracle, kv="int8")
    packets, session = record(engine, monkeypatch), engine.session()
    session.extend(random_ids(engine, 64), logits="last")
    stats = session.last_stats
    assert stats.kv_bytes == sent_bytes(packets) > 0
    assert (stats.new_prompt_tokens, stats.cached_prompt_tokens) == (64, 0)
    session.extend([5], logits="last")  # no prefill: nothing crosses
    stats = session.last_stats
    assert (stats.kv_bytes, stats.kv_native_bytes, stats.cached_prompt_tokens) == (0, 0, 64)


def mean_divergence(want, got):
    """KL(want, got) of the next token, in nats, over the rows."""
    p, q = (x - x.max(-1, keepdims=True) for x in (want.astype(np.float64), got.astype(np.float64)))
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    return float((np.exp(p) * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("model", ["mini", "mistral_swa"])
def test_what_each_tier_does_to_the_logits(model, open_engine):
    """Measured, latent and grouped attention: fp16 6e-8 and 1e-7, int8 2e-5 and 9e-5, int4 2e-2.

    INT4's steps are 18 times INT8's, and the divergence grows with the square: 330 times.
    """
    engine = open_engine(MINI if model == "mini" else oracle_folder(model), compute="exact")
    ids = prose_ids(engine) if model == "mini" else random_ids(engine, 200)

    def scored(name):
        engine.kv_policy = make_policy(name, 1.0, engine.kv_policy.layout)
        session = engine.session()
        session.extend(ids[:-20], logits=None)
        return session.extend(ids[-20:])

    want = scored("native")
    assert scored("native").tobytes() == want.tobytes()
    fp16, int8, int4 = (mean_divergence(want, scored(name)) for name in ("fp16", "int8", "int4"))
    assert 0 < fp16 < 1e-6
    assert 50 * fp16 < int8 < 4e-4
    assert 50 * int8 < int4
    assert int4 > 3e-3


def test_fp16_carries_bf16_unchanged(open_engine):
    """Eight significant bits fit into eleven; only what is below 2^-17 loses any."""
    engine = open_engine(MINI, kv="fp16")
    ids, sessions = prose_ids(engine, 100), []
    for name in ("fp16", "native"):
        engine.kv_policy = make_policy(name, 1.0, engine.kv_policy.layout)
        sessions.append(engine.session())
        sessions[-1].extend(ids, logits=None)
    for layer in range(engine.spec.num_layers):
        sent, native = (
            (session.cache.read(layer, 0, 100).astype(np.uint32) << 16).view(np.float32)
            for session in sessions
        )
        large = np.abs(native) > 2.0**-14
        assert large.mean() > 0.99
        assert (sent[large] == native[large]).all()


def test_window_mass_goes_to_the_policy_that_asks(open_engine):
    engine = open_engine(MINI)
    seen = []

    class Curious(ByLayer):
        window = 16

        def tiers(self, layer, first_position, num_tokens, mass_n=None):
            seen.append((layer, first_position, num_tokens, mass_n.copy()))
            return np.full(num_tokens, Tier.NATIVE, np.uint8)

    session = engine.session()
    session.extend([5] * 30, logits=None)
    engine.kv_policy = Curious(lambda layer, count: None, window=16)
    session.extend(random_ids(engine, 50), logits=None)
    assert [entry[:3] for entry in seen] == [(i, 30, 50) for i in range(engine.spec.num_layers)]
    for *_, mass_n in seen:
        assert mass_n.shape == (50,)
        assert 0 < mass_n.sum() <= 16 + 1e-3  # the rest went to the 30 tokens before
        assert mass_n[-1] > 0


@pytest.mark.parametrize("name", ["int4", "spectrum", "pdtrim"])
def test_a_damaged_packet_is_refused_and_the_next_request_is_right(
    name, small_oracle, open_engine, monkeypatch
):
    engine = open_engine(small_oracle, kv=name)
    ids = random_ids(engine, 40)
    want = tokens_of(engine.session().generate(ids, GREEDY))
    session, send = engine.session(), engine.decode.channel.send_packet

    def flip(packet, cancelled):
        if packet.layer == 1:
            (tier, *_) = packet.payload
            packet.payload[tier].view(np.uint8).reshape(-1)[7] ^= 1
        return send(packet, cancelled)

    with monkeypatch.context() as patch:
        patch.setattr(engine.decode.channel, "send_packet", flip)
        with pytest.raises(PacketRefused, match="checksum"):
            session.extend(ids, logits=None)
    assert len(session) == len(session.cache) == 0
    assert tokens_of(session.generate(ids, GREEDY)) == want


def test_stale_packets_of_every_policy_are_dropped(small_oracle, open_engine, monkeypatch):
    engine = open_engine(small_oracle, kv="pdtrim", kv_budget=0.3)
    packets, session = record(engine, monkeypatch), engine.session()
    session.extend(random_ids(engine, 40), logits=None)
    session.rewind(0)
    for packet in packets[:]:
        engine.decode.channel.send_packet(packet, lambda: False)
    assert session.extend([4], logits="last").shape == (1, engine.spec.vocab_size)
    assert len(session.cache) == 1
    assert session.cache.arrived_bytes == sent_bytes(packets[: engine.spec.num_layers])


@pytest.mark.parametrize("name", [name for name in NAMES if name != "k8v4"])
def test_a_channel_of_one_packet_suffices(name, small_oracle, open_engine):
    engine = open_engine(small_oracle, channel_packets=1, kv=name, kv_budget=0.3)
    handles = [engine.session().generate([1, 2, 3 + i] * 20, GREEDY) for i in range(3)]
    assert all(len(tokens_of(handle)) == 20 for handle in handles)


@pytest.mark.parametrize("name", ["spectrum", "pdtrim", "snapkv", "int4"])
def test_a_talk_with_lossy_turns_answers_and_rewinds(name, open_engine):
    engine = open_engine(MINI, kv=name, kv_budget=0.3)
    session, marks = engine.session(), []
    for turn in range(4):
        marks.append(len(session))
        assert len(tokens_of(session.generate(random_ids(engine, 80, seed=turn), GREEDY))) == 20
        assert len(session.cache) == len(session) - 1
    timeline = list(session.timeline.ids)
    assert session.rewind(marks[2] + 5) == 0
    again = tokens_of(session.generate(timeline[marks[2] + 5 : marks[2] + 80], GREEDY))
    assert len(again) == 20
    other = engine.session()
    for turn in range(2):
        tokens_of(other.generate(random_ids(engine, 80, seed=turn), GREEDY))
    assert other.timeline.ids == timeline[: marks[2]]  # the same talk gives the same tokens


def test_the_policy_of_an_engine_is_checked(small_oracle, open_engine):
    for settings in ({"kv": "int2"}, {"kv": "spectrum", "kv_budget": 0.0}, {"kv_budget": 1.5}):
        with pytest.raises(BadParameter):
            open_engine(small_oracle, **settings)
    assert open_engine(small_oracle).kv_policy.name == "native"


def test_auto_is_native_in_shared_memory_and_lossy_behind_a_slow_link(small_oracle, open_engine):
    assert open_engine(small_oracle, kv="auto").kv_policy.name == "native"
    slow = open_engine(small_oracle, kv="auto", kv_budget=0.3, kv_link_bytes_per_second=1e3)
    assert slow.kv_policy.name == "spectrum"
    fast = open_engine(small_oracle, kv="auto", kv_link_bytes_per_second=1e15)
    assert fast.kv_policy.name == "native"


@pytest.mark.parametrize(
    ("prefill", "encode", "decode", "link", "want"),
    [
        (1e8, 1e9, 1e9, None, False),  # shared memory
        (1e8, 1e9, 1e9, 1e9, False),  # the link keeps up with prefill
        (1e8, 1e9, 1e9, 5e7, True),  # it does not
        (1e8, 1e9, 4e7, 5e7, False),  # but decoding is slower still
        (1e8, 6e7, 1e9, 5e7, False),  # or encoding takes the prefill thread's time
        (1e8, 1e9, 1e9, 9.9e7, False),  # a link hardly slower than prefill is not worth it
    ],
)
def test_lossy_pays_where_the_link_is_the_bottleneck(prefill, encode, decode, link, want):
    assert pays(StageRates(prefill, encode, decode), link, bytes_sent=0.5) is want


def test_native_kv_of_four_bytes_takes_the_link_twice_as_long():
    rates = StageRates(prefill=1e8, encode=1e9, decode=1e9)
    assert not pays(rates, 1.5e8, bytes_sent=0.5)
    assert pays(rates, 1.5e8, bytes_sent=0.5, native_bytes_sent=2.0)


def test_auto_counts_the_bytes_of_the_compute_type(small_oracle, open_engine, monkeypatch):
    asked = []
    monkeypatch.setattr("moechat.kv.auto.pays", lambda *figures: asked.append(figures) or True)
    for compute in ("bf16", "exact"):
        open_engine(small_oracle, compute=compute, kv="auto", kv_link_bytes_per_second=1e9)
    assert [figures[-1] for figures in asked] == [1.0, 2.0]


@pytest.mark.parametrize("compute", ["bf16", "exact"])
def test_codec_rates_are_measured(compute, small_oracle, open_engine):
    policy = open_engine(small_oracle, compute=compute, kv="spectrum").kv_policy
    assert all(1e4 < rate < 1e12 for rate in measure_codec(policy, compute))
