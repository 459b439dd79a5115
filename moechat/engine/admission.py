"""How many sessions an engine can hold: the KV cache of each, at the full context, must fit."""

from __future__ import annotations

from moechat.errors import DoesNotFit
from moechat.models.spec import ModelSpec
from moechat.sizes import size_text

_ELEMENT_BYTES = {"bf16": 2, "exact": 4}
_USABLE = 0.9  # of the free memory; the rest is for activations and for other programs


def session_bytes(spec: ModelSpec, compute: str, context_tokens: int, speculate: bool) -> int:
    """KV bytes of one session whose context is full.

    A layer with a sliding window counts like any other: a prefill brings all slots before the old
    ones are freed. Page ends and the page table are left out.
    """
    layers = spec.num_layers + speculate
    return layers * spec.kv_width * _ELEMENT_BYTES[compute] * context_tokens


def sessions_that_fit(one_bytes: int, free_bytes: int | None) -> int | None:
    """How many sessions of ``one_bytes`` the memory holds; None when the system does not say."""
    return None if free_bytes is None else int(_USABLE * free_bytes) // max(one_bytes, 1)


def admit(wanted: int, one_bytes: int, context_tokens: int, free_bytes: int | None) -> None:
    """Raise DoesNotFit, which says how many do, unless ``wanted`` sessions fit."""
    fit = sessions_that_fit(one_bytes, free_bytes)
    if fit is None or wanted <= fit:
        return
    raise DoesNotFit(
        f"{wanted} conversations at once do not fit; {fit} would",
        f"the KV cache of one takes {size_text(one_bytes)} at a context of {context_tokens} "
        f"tokens, and {size_text(free_bytes or 0)} are free",
        f"Try --concurrency {fit}, or a smaller --ctx" if fit else "Try a smaller --ctx",
    )
