"""What a session holds and what it answered, to compare with another's."""

from __future__ import annotations


def kv_bytes(session):
    """Of the slots that every layer still holds."""
    cache = session.cache
    return [
        cache.read(layer, cache.first_slot(layer), len(cache)).tobytes()
        for layer in range(cache.num_layers)
    ]


def answer(session, ids, sampling):
    handle = session.generate(ids, sampling)
    tokens = [event.token_id for event in handle if event.token_id is not None]
    return tokens, handle.result().finish_reason
