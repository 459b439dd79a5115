"""Sessions at random on an engine whose prompts and steps are on torch's CPU device.

What is cut, rewound, sent again or restored from a snapshot must leave nothing behind: in exact
mode every answer is the CPU's.
"""

from __future__ import annotations

import random
import threading

import pytest

from moechat import Engine, SamplingParams
from moechat.events import PrefillProgress

pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_end=True)
STEPS, SESSIONS, LONGEST = 10, 2, 600


def answer(session, ids, cancel_at=None):
    """Tokens; cancelled once ``cancel_at`` layers of the prompt are done."""
    tokens = []
    for event in session.generate(ids, GREEDY):
        if isinstance(event, PrefillProgress) and event.layers_done == cancel_at:
            session.cancel()
        if event.token_id is not None:
            tokens.append(event.token_id)
    return tokens


def walk(engine, reference, lock, seed, ended):
    draw = random.Random(seed)
    session, line, wrong = engine.session(), [], []
    for step in range(STEPS):
        ids = [draw.randrange(10, 4000) for _ in range(draw.choice([1, 2, 30, 150]))]
        if len(line) + len(ids) > LONGEST or draw.random() < 0.2:
            kept = draw.randrange(len(line)) if line else 0
            session.rewind(kept)
            line = line[:kept]
        if draw.random() < 0.5:
            answer(session, ids, cancel_at=draw.randrange(1, 7))
            session.rewind(len(line))
        got = answer(session, ids)
        line += ids
        with lock:
            fresh = reference.session()
            if got != answer(fresh, line):
                wrong.append((step, len(line)))
            fresh.close()
        line += got
        if draw.random() < 0.2:
            snapshot = session.snapshot()
            session.close()
            session = engine.session(snapshot)
    session.close()
    ended[seed] = wrong


@pytest.mark.parametrize("device,decode", [("torch-cpu", "on"), ("torch-cpu:2", "off")])
def test_nothing_of_what_was_cut_is_left(device, decode):
    ended, lock = {}, threading.Lock()
    with (
        Engine.open("mini", compute="exact", threads=1) as reference,
        Engine.open(
            "mini", compute="exact", threads=1, device=device, gpu_prefill_tokens=0,
            gpu_decode=decode, gpu_experts=4 if decode == "on" else 0,
        ) as engine,
    ):  # fmt: skip
        threads = [
            threading.Thread(target=walk, args=(engine, reference, lock, seed, ended))
            for seed in range(SESSIONS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads)
    assert ended == {seed: [] for seed in range(SESSIONS)}
