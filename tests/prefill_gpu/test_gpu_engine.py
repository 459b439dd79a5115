"""An engine whose prompts are read by streamed prefill, on torch's CPU device."""

from __future__ import annotations

import pytest
from oracles import MINI

from moechat import SamplingParams
from moechat.events import PrefillProgress

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_end=True)
PROMPT = [0, 3, 1204, 5, 4, *range(100, 300)]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def open_streamed(open_engine):
    def open_(path, **settings):
        return open_engine(path, **{"device": "torch-cpu", "gpu_prefill_tokens": 0} | settings)

    return open_


def answer(session, ids, params=GREEDY):
    events = list(session.generate(ids, params))
    return [event.token_id for event in events if event.token_id is not None], events


@pytest.mark.parametrize("compute", ["bf16", "exact"])
def test_greedy_tokens_are_those_of_the_cpu(compute, open_engine, open_streamed):
    want, _ = answer(open_engine(MINI, compute=compute).session(), PROMPT)
    session = open_streamed(MINI, compute=compute).session()
    got, events = answer(session, PROMPT)
    assert got == want
    stats = events[-1].stats
    assert stats.prefill_device == "torch-cpu"
    assert stats.prefill_streamed_bytes > 10_000_000  # the experts of mini
    assert 0 < stats.prefill_compute_seconds < stats.prefill_seconds
    assert stats.prefill_stream_seconds > 0 and stats.prefill_wait_seconds >= 0
    progress = [event for event in events if isinstance(event, PrefillProgress)]
    assert [event.layers_done for event in progress] == list(range(1, 7))
    assert all(event.stream_bytes_per_second > 0 for event in progress)
