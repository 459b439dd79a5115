"""A plan's bytes are those of the packet that the codec makes of it."""

from __future__ import annotations

import numpy as np
import pytest

from moechat.kv.layout import KVLayout, Part
from moechat.kv.packet import encode_packet
from moechat.kv.policy import NAMES, make_policy

LAYOUTS = {
    "grouped": KVLayout(tuple(Part(i * 24, 24, "key" if i < 2 else "value") for i in range(4))),
    "latent": KVLayout((Part(0, 48, "latent"), Part(48, 16, "rotary"))),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("centre_keys", [False, True])
@pytest.mark.parametrize("budget", [0.1, 0.31, 0.5, 0.9, 1.0])
def test_bytes(name, layout, centre_keys, budget):
    if name == "k8v4" and layout is LAYOUTS["latent"]:
        return
    rng = np.random.default_rng(0)
    n = 101
    rows = rng.standard_normal((n, layout.width)).astype(np.float32)
    mass_n = rng.pareto(1.0, n).astype(np.float32)
    policy = make_policy(name, budget, layout, num_tiers=4, centre_keys=centre_keys)
    plan = policy.plan(0, 0, n, mass_n)
    positions = np.arange(n, dtype=np.int32)
    packet = encode_packet(
        0, 0, 0, positions, rows, plan.tiers, layout, centre_keys=policy.centre_keys
    )
    native = 4 if name == "native" else 2  # float32 rows stay as they are
    assert packet.num_bytes == plan.num_bytes * native // 2
    assert len(packet.positions) == n - plan.num_dropped
