"""KV that a policy's tiers cannot hold crosses natively; the request does not end."""

from __future__ import annotations

import json

import numpy as np
import pytest
from oracle_formats import Stored, write_safetensors
from oracle_variants import float_tensors
from oracles import ORACLES, scratch_folder

from moechat import SamplingParams
from moechat.kv.tiers import DROPPED, Tier

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_end=True)
NAME, LARGE = "mistral_swa", np.float32(2.0**24)  # exact in BF16, far beyond float16


def tokens_of(handle):
    return [event.token_id for event in handle if event.token_id is not None]


class NativeInLayer:
    """A policy, but for one layer: there nothing that it keeps is coded."""

    def __init__(self, layer, policy):
        self.layer, self.policy = layer, policy
        self.name, self.window, self.centre_keys = policy.name, policy.window, policy.centre_keys

    def tiers(self, layer, first_position, num_tokens, mass_n=None):
        tiers = self.policy.tiers(layer, first_position, num_tokens, mass_n)
        if layer == self.layer:
            tiers[tiers != DROPPED] = Tier.NATIVE
        return tiers


@pytest.fixture(scope="module")
def folder():
    """Layer 1 has values of 2^24, which its output projection takes back."""
    folder = scratch_folder() / "overflow"
    folder.mkdir()
    values = {name: tensor.array for name, tensor in float_tensors(NAME).items()}
    for part, factor in (("v_proj", LARGE), ("o_proj", 1 / LARGE)):
        values[f"model.layers.1.self_attn.{part}.weight"] *= factor
    tensors = {name: Stored("F32", array) for name, array in values.items()}
    config = json.loads((ORACLES / NAME / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


@pytest.mark.parametrize("compute", ["bf16", "exact"])
@pytest.mark.parametrize("name", ["fp16", "int8", "int4", "k8v4", "spectrum", "pdtrim", "snapkv"])
def test_that_layer_crosses_natively(name, compute, folder, open_engine):
    engine = open_engine(folder, compute=compute, kv=name, kv_budget=0.4)
    session = engine.session()
    *_, last = session.generate([5, 6, 7, 8] * 10, GREEDY)
    assert last.finish_reason == "length"
    assert last.stats.kv_native_layers == 1
    # The same as when the policy asks for exactly that.
    engine.kv_policy = NativeInLayer(1, engine.kv_policy)
    other = engine.session()
    *_, same = other.generate([5, 6, 7, 8] * 10, GREEDY)
    assert other.timeline.ids == session.timeline.ids
    assert (same.stats.kv_native_layers, same.stats.kv_bytes) == (0, last.stats.kv_bytes)
    for layer in range(engine.spec.num_layers):
        held = [one.cache.read(layer, 0, one.cache.num_slots(layer)) for one in (session, other)]
        assert held[0].tobytes() == held[1].tobytes()


def test_native_needs_nothing_of_it(folder, open_engine):
    engine = open_engine(folder)
    session = engine.session()
    session.extend([5, 6, 7, 8], logits=None)
    assert session.last_stats.kv_native_layers == 0


def test_an_extend_counts_too_and_layers_add_up(folder, open_engine):
    session = open_engine(folder, kv="int8").session()
    session.extend([5, 6, 7, 8], logits=None)
    assert session.last_stats.kv_native_layers == 1
    assert tokens_of(session.generate([9], GREEDY))
