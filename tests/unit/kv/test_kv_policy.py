"""What every policy promises, on hostile mass and odd lengths."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from moechat.kv.layout import KVLayout, Part
from moechat.kv.policy import NAMES, NUM_SINKS, UNIFORM, WINDOW, make_policy
from moechat.kv.tiers import DROPPED, Tier, budget_bytes_per_token, bytes_per_token

GROUPED = KVLayout(tuple(Part(i * 64, 64, "key" if i < 2 else "value") for i in range(4)))
LATENT = KVLayout((Part(0, 128, "latent"), Part(128, 32, "rotary")))
BUDGETS = st.floats(0, 1, exclude_min=True)
LAYOUTS = st.sampled_from([GROUPED, LATENT])


@st.composite
def masses(draw):
    n = draw(st.integers(1, 200))
    kind = draw(st.sampled_from(["none", "zero", "hostile", "usual"]))
    if kind == "none":
        return n, None
    if kind == "zero":
        return n, np.zeros(n, np.float32)
    if kind == "hostile":
        return n, draw(arrays(np.float32, n, elements=st.floats(width=32)))
    seed = draw(st.integers(0, 2**32 - 1))
    return n, (np.random.default_rng(seed).pareto(1.0, n) * 1e-3).astype(np.float32)


def policy_lowest(policy):
    return policy.ladder.tiers[0] if policy.name == "spectrum" else Tier.FP16


def cost(layout, tiers):
    return sum(bytes_per_token(layout, Tier(tier)) for tier in tiers if tier != DROPPED)


@given(
    st.sampled_from(NAMES),
    BUDGETS,
    LAYOUTS,
    st.integers(2, 4),
    st.booleans(),
    st.booleans(),
    masses(),
)
def test_every_plan(name, budget, layout, num_tiers, begins, centre_keys, mass):
    n, mass_n = mass
    if name == "k8v4":
        layout = GROUPED
    policy = make_policy(name, budget, layout, num_tiers=num_tiers, centre_keys=centre_keys)
    plan = policy.plan(3, 0 if begins else 7, n, mass_n)
    assert plan.tiers.dtype == np.uint8 and plan.tiers.shape == (n,)
    assert plan.tiers[-1] != DROPPED
    assert plan.num_dropped == np.count_nonzero(plan.tiers == DROPPED)
    assert np.array_equal(plan.tiers, policy.tiers(3, 0 if begins else 7, n, mass_n))
    centre = 0
    if policy.centre_keys and set(plan.tiers) & {Tier.INT8, Tier.K8V4, Tier.INT4}:
        centre = 2 * layout.centred_width
    assert plan.num_bytes == cost(layout, plan.tiers) + centre
    if name not in UNIFORM:
        allowed = n * budget * budget_bytes_per_token(layout)
        least = min(bytes_per_token(layout, tier) for tier in set(plan.tiers) - {DROPPED})
        assert plan.num_bytes <= max(allowed, least) + centre
        assert centre <= budget_bytes_per_token(layout)  # so within one token
        if plan.num_dropped == 0 and allowed >= cost(layout, [policy_lowest(policy)] * n) + centre:
            assert plan.num_bytes <= max(allowed, least)


@given(BUDGETS, LAYOUTS, st.integers(2, 4), st.booleans(), masses())
def test_sinks_and_window_up_to_a_quarter_of_the_budget(budget, layout, num_tiers, begins, mass):
    n, mass_n = mass
    policy = make_policy("spectrum", budget, layout, num_tiers=num_tiers, centre_keys=False)
    plan = policy.plan(0, 0 if begins else 1, n, mass_n)
    tokens = list(range(n))
    sinks = tokens[: n - 1][:NUM_SINKS] if begins else []
    window = [token for token in reversed(tokens) if token not in sinks][:WINDOW]
    most = math.floor(n * budget / 4)
    protected = [window[0], *sinks, *window[1:]][:most]
    assert all(plan.tiers[token] != DROPPED for token in protected)
    lowest = policy.ladder.cost_bytes[0]
    top = bytes_per_token(layout, Tier.FP16)
    spare = math.floor(n * budget * budget_bytes_per_token(layout)) - n * lowest
    if spare < 0 or spare >= len(protected) * (top - lowest):
        assert all(plan.tiers[token] == Tier.FP16 for token in protected)
    if spare >= 0:
        assert plan.num_dropped == 0


@given(BUDGETS, BUDGETS, LAYOUTS, st.integers(2, 4), masses())
def test_more_budget_is_spent(one, two, layout, num_tiers, mass):
    n, mass_n = mass
    less, more = (
        make_policy("spectrum", budget, layout, num_tiers=num_tiers).plan(0, 0, n, mass_n)
        for budget in sorted((one, two))
    )
    assert more.num_bytes > less.num_bytes - budget_bytes_per_token(layout)
    assert more.num_dropped <= less.num_dropped + 1
    if one == two:
        assert np.array_equal(less.tiers, more.tiers)


@given(BUDGETS, masses())
def test_pdtrim_keeps_the_ends(budget, mass):
    n, mass_n = mass
    plan = make_policy("pdtrim", budget, GROUPED).plan(0, 0, n, mass_n)
    kept = max(math.floor(n * budget * 512) // 512, 1)
    sinks = min(NUM_SINKS, kept - 1)
    want = [Tier.FP16] * sinks + [DROPPED] * (n - kept) + [Tier.FP16] * (kept - sinks)
    assert plan.tiers.tolist() == want
    later = make_policy("pdtrim", budget, GROUPED).plan(0, 9, n, mass_n)
    assert later.tiers.tolist() == [DROPPED] * (n - kept) + [Tier.FP16] * kept


def test_snapkv_keeps_the_window_and_what_it_reads():
    mass_n = np.zeros(200, np.float32)
    mass_n[[0, 60, 120]] = [9.0, 1.0, 2.0]
    plan = make_policy("snapkv", 0.25, GROUPED).plan(0, 0, 200, mass_n)
    kept = np.flatnonzero(plan.tiers == Tier.FP16).tolist()
    important = [*range(57, 64), *range(117, 124)]
    assert kept == [0, 1, 2, 3, *important, *range(168, 200)]
    assert (plan.num_dropped, plan.num_bytes) == (150, 50 * 512)


def test_spectrum_gives_bits_to_what_is_read():
    mass_n = np.full(1000, 1e-3, np.float32)
    mass_n[500] = 0.5
    for num_tiers, low, high in ((2, Tier.INT8, Tier.FP16), (3, Tier.INT4, Tier.INT8)):
        policy = make_policy(
            "spectrum", 0.6 if num_tiers == 2 else 0.32, GROUPED, num_tiers=num_tiers
        )
        tiers = policy.tiers(0, 0, 1000, mass_n)
        assert (tiers[497:504] <= high).all()
        assert np.bincount(tiers[4:490])[low] > 400


@pytest.mark.parametrize("name", NAMES)
def test_window_is_asked_for_where_it_is_read(name):
    assert make_policy(name, 0.5, GROUPED).window == (
        WINDOW if name in ("spectrum", "snapkv") else 0
    )


@pytest.mark.parametrize("name", NAMES)
def test_no_tokens_at_all(name):
    plan = make_policy(name, 0.5, GROUPED).plan(0, 0, 0, np.zeros(0, np.float32))
    assert (plan.tiers.shape, plan.num_dropped, plan.num_bytes) == ((0,), 0, 0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("budget", [0.0, -0.1, 1.1, math.nan, math.inf])
def test_budget_out_of_range(name, budget):
    with pytest.raises(ValueError, match=r"the KV budget is out of range: .* is not in \(0, 1\]"):
        make_policy(name, budget, GROUPED)


def test_all_in_float16_when_the_budget_pays_for_it():
    plan = make_policy("spectrum", 1.0, GROUPED, centre_keys=True).plan(0, 0, 50)
    assert set(plan.tiers) == {Tier.FP16} and plan.num_bytes == 50 * 512


def test_spectrum_centres_the_keys_of_grouped_attention():
    centring = {
        (name, layout is GROUPED)
        for name in NAMES
        for layout in (GROUPED, LATENT)
        if (name, layout) != ("k8v4", LATENT) and make_policy(name, 0.5, layout).centre_keys
    }
    assert centring == {("spectrum", True)}
    assert not make_policy("spectrum", 0.5, GROUPED, centre_keys=False).centre_keys
    assert make_policy("int4", 0.5, GROUPED, centre_keys=True).centre_keys


def test_latent_attention_has_no_values_to_code_apart():
    with pytest.raises(ValueError, match="k8v4 needs values beside the keys"):
        make_policy("k8v4", 0.5, LATENT)
    four = make_policy("spectrum", 0.5, LATENT, num_tiers=4)
    assert four.ladder.tiers == (Tier.INT4, Tier.INT8, Tier.FP16)


def test_unknown_names_and_tiers():
    with pytest.raises(ValueError, match="the KV policy is not known: 'zip'"):
        make_policy("zip", 0.5, GROUPED)
    with pytest.raises(ValueError, match="the number of KV tiers is out of range: 5"):
        make_policy("spectrum", 0.5, GROUPED, num_tiers=5)


@pytest.mark.parametrize("name", NAMES)
def test_figures_that_do_not_fit(name):
    policy = make_policy(name, 0.5, GROUPED)
    with pytest.raises(ValueError, match="cannot be negative"):
        policy.tiers(0, 0, -1)
    with pytest.raises(ValueError, match=r"shape \(3,\) for 4 tokens"):
        policy.tiers(0, 0, 4, np.zeros(3, np.float32))
