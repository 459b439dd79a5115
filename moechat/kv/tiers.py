"""Precision tiers of KV tokens: how each part of a slot is coded, and what that costs in bytes."""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from typing import Literal

from moechat.kv.layout import Kind, KVLayout

Code = Literal["f16", "int8", "int4"]

BITS: dict[Code, int] = {"f16": 16, "int8": 8, "int4": 4}
DROPPED = 255  # in plans only: the token does not cross


class Tier(IntEnum):
    """A token's precision. NATIVE is the compute type, bit for bit."""

    NATIVE = 0
    FP16 = 1
    INT8 = 2
    K8V4 = 3
    INT4 = 4


# The rotary key of latent attention in the INT4 tier. On the bundled model, six windows of 1,000
# tokens all in this tier and centred, the KL of the logits is 0.0021 with int8, as with f16, and
# 0.0030 with int4 (not centred 0.0019 and 0.0035); DeepSeek-V3 would save 32 of 324 bytes.
ROTARY_OF_INT4: Code = "int8"

_CODES: dict[Tier, dict[Kind, Code]] = {
    Tier.FP16: {"key": "f16", "value": "f16", "latent": "f16", "rotary": "f16"},
    Tier.INT8: {"key": "int8", "value": "int8", "latent": "int8", "rotary": "f16"},
    Tier.K8V4: {"key": "int8", "value": "int4"},  # latent attention has no values of its own
    Tier.INT4: {"key": "int4", "value": "int4", "latent": "int4", "rotary": ROTARY_OF_INT4},
}


@lru_cache(maxsize=64)
def coded_parts(layout: KVLayout, tier: Tier) -> tuple[tuple[int, int, Code], ...]:
    """(begin, width, code) of every part, as the native codec takes it.

    ValueError for K8V4 with latent attention, and for NATIVE, which is not coded.
    """
    codes = _CODES.get(tier, {})
    try:
        return tuple((part.begin, part.width, codes[part.kind]) for part in layout.parts)
    except KeyError:
        raise ValueError(f"the tier {tier.name} has no coding for this KV layout") from None


@lru_cache(maxsize=64)
def tier_sizes(layout: KVLayout, tier: Tier) -> tuple[int, int]:
    """(payload bytes, scales) a token of a coded tier. ValueError as coded_parts."""
    payload_bytes = num_scales = 0
    for _, width, code in coded_parts(layout, tier):
        payload_bytes += (width * BITS[code] + 7) // 8
        num_scales += code != "f16"
    return payload_bytes, num_scales


def bytes_per_token(layout: KVLayout, tier: Tier, element_bytes: int = 2) -> int:
    """Payload and float16 scales; ``element_bytes`` is that of the compute type, for NATIVE."""
    if tier == Tier.NATIVE:
        return element_bytes * layout.width
    payload_bytes, num_scales = tier_sizes(layout, Tier(tier))
    return payload_bytes + 2 * num_scales


def budget_bytes_per_token(layout: KVLayout) -> int:
    """What a budget of 1 is: two bytes an element."""
    return 2 * layout.width
