"""Prompts and answers of engines whose prompts are read by streamed prefill."""

from __future__ import annotations

import time

import pytest

from moechat import SamplingParams
from moechat.events import PrefillProgress

pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")

from moechat.prefill.gpu.gpu_prefill import GpuSpan

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_end=True)
PROMPT = [0, 3, 1204, 5, 4, *range(100, 170)]


def answer(session, ids, params=GREEDY):
    events = list(session.generate(ids, params))
    return [event.token_id for event in events if event.token_id is not None], events


def cancelled_after(session, ids, layers):
    """Cut a prefill when so many layers have run; returns how many had."""
    handle, seen = session.generate(ids, GREEDY), 0
    before = len(session) - len(ids)
    for event in handle:
        if isinstance(event, PrefillProgress):
            seen = event.layers_done
            if seen >= layers:
                handle.cancel()
    assert event.finish_reason == "cancelled"
    assert len(session.cache) <= before
    session.rewind(before)
    return seen


def slots_of(session):
    cache, count = session.cache, len(session.cache)
    return [cache.read(layer, 0, count) for layer in range(cache.num_layers)]


def stop_after(patch, layers, kind=GpuSpan):
    """Let so many layers of prefills pass, and hold the next until it is cancelled."""
    run_layer, passed = kind.run_layer, []

    def held(span, cancel, window=0):
        while len(passed) >= layers and not cancel.raised:
            time.sleep(0.001)
        passed.append(span)
        return run_layer(span, cancel, window)

    patch.setattr(kind, "run_layer", held)


def raises(error):
    def call(*arguments, **more):
        raise error

    return call
