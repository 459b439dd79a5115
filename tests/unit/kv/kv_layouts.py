"""Small KV layouts of both kinds of attention, odd widths included, and spans in mixed tiers."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from moechat.kv.layout import KVLayout, Part
from moechat.kv.tiers import DROPPED, Tier


def grouped(heads: int, dim: int) -> KVLayout:
    return KVLayout(
        tuple(Part(i * dim, dim, "key" if i < heads else "value") for i in range(2 * heads))
    )


def latent(rank: int, rope: int) -> KVLayout:
    return KVLayout((Part(0, rank, "latent"), Part(rank, rope, "rotary")))


GROUPED, LATENT = grouped(2, 16), latent(32, 8)


@st.composite
def spans(draw: st.DrawFn) -> tuple[KVLayout, str, np.ndarray, int, bool]:
    """Layout, compute type, a tier for each token, a seed for rows, whether keys are centred."""
    if draw(st.booleans()):
        layout = grouped(draw(st.integers(1, 3)), draw(st.integers(1, 40)))
        codes = [*Tier, DROPPED]
    else:
        layout = latent(draw(st.integers(1, 70)), draw(st.integers(1, 9)))
        codes = [tier for tier in Tier if tier != Tier.K8V4] + [DROPPED]
    tiers = draw(st.lists(st.sampled_from(codes), max_size=20))
    compute = draw(st.sampled_from(["bf16", "exact"]))
    seed, centre = draw(st.integers(0, 2**32 - 1)), draw(st.booleans())
    return layout, compute, np.array(tiers, np.uint8), seed, centre
