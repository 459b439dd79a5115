"""Small KV layouts of both kinds of attention, odd widths included."""

from __future__ import annotations

from moechat.kv.layout import KVLayout, Part


def grouped(heads: int, dim: int) -> KVLayout:
    return KVLayout(
        tuple(Part(i * dim, dim, "key" if i < heads else "value") for i in range(2 * heads))
    )


def latent(rank: int, rope: int) -> KVLayout:
    return KVLayout((Part(0, rank, "latent"), Part(rank, rope, "rotary")))


GROUPED, LATENT = grouped(2, 16), latent(32, 8)
