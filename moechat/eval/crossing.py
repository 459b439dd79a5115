"""A prompt through the KV path as an answer would send it, and what that cost.

What crosses is prefilled, encoded, sent, decoded and put into the cache of the decode side; nothing
of it is kept in another form. What comes next reads exactly what arrived:

- ``score`` prefills the text after it in one go. Prefill reads the tokens before its own span from
  the cache, as decode does, and its own span as it was computed: so the text is predicted from what
  arrived, and its own keys and values are not encoded. That holds for one extend only: a second one
  would read the first one's tokens as they arrived. Hence all its logits at once: 4 bytes x tokens
  x vocabulary.
- ``feed`` steps token by token, as decode does: what a step writes is never encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moechat.engine.session import Session
from moechat.eval.likelihood import Likelihood, likelihood


@dataclass(frozen=True, slots=True)
class Traffic:
    """What crossed. ``native_bytes``: the same at 2 bytes an element. Seconds are wall time."""

    tokens: int = 0
    num_bytes: int = 0
    native_bytes: int = 0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.tokens + other.tokens,
            self.num_bytes + other.num_bytes,
            self.native_bytes + other.native_bytes,
            self.encode_seconds + other.encode_seconds,
            self.decode_seconds + other.decode_seconds,
        )


def cross(session: Session, ids: Sequence[int]) -> None:
    """Send ``ids``, in place of all that the session holds."""
    session.rewind(0)
    session.extend(ids, logits=None)


def last_traffic(session: Session) -> Traffic:
    """Of the request that ended last."""
    stats = session.last_stats
    return Traffic(
        stats.new_prompt_tokens,
        stats.kv_bytes,
        stats.kv_native_bytes,
        stats.kv_encode_seconds,
        stats.kv_decode_seconds,
    )


def score(session: Session, ids: Sequence[int]) -> Likelihood:
    """Of all ids but the first, which follows what crossed."""
    logits_TV = session.extend(ids[:-1])
    assert logits_TV is not None
    return likelihood(logits_TV, ids[1:])


def feed(session: Session, ids: Sequence[int]) -> None:
    """Put ``ids`` on the timeline by decode steps."""
    for token_id in ids:
        session.extend([token_id], logits="last")
