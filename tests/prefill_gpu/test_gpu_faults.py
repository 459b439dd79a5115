"""Streamed prefill where devices fail, are full, or are closed; on torch's CPU device."""

from __future__ import annotations

import os
import signal
import threading
import weakref

import pytest
from oracles import MINI

from moechat import _native
from moechat.engine import device_names, gpu_survey, gpus
from moechat.engine.engine import Engine
from moechat.errors import DeviceUnavailable, DoesNotFit

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")

from streamed_engine import PROMPT, answer, cancelled_after, raises, stop_after  # noqa: E402

from moechat.prefill.gpu import stream_plan, survey  # noqa: E402
from moechat.prefill.gpu.lane import Lane  # noqa: E402
from moechat.prefill.gpu.stream_prefill import StreamPrefill  # noqa: E402
from moechat.prefill.gpu.streamed_source import StreamedSource  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def test_no_more_is_taken_than_is_free(open_engine, open_streamed, monkeypatch):
    """Whatever --gpu-memory allows."""
    want, _ = answer(open_engine(MINI).session(), PROMPT)
    monkeypatch.setattr(stream_plan, "free_memory_bytes", lambda devices: 48_000_000)
    for allowed in (None, 1 << 40):
        engine = open_streamed(MINI, gpu_memory_bytes=allowed)
        assert engine.prefill_choice.gpu.max_tokens < engine.context_tokens
        assert answer(engine.session(), PROMPT)[0] == want


def test_memory_is_given_back_at_close(open_streamed, monkeypatch):
    """torch keeps what was freed: to others it is taken."""
    done = []
    monkeypatch.setattr(StreamedSource, "close", lambda source: done.append("closed"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda name: (done.append(name), (5 << 30, 0))[1]
    )
    engine = open_streamed(MINI)
    engine.prefill_choice.gpu.close()
    assert done == ["closed", "emptied"]
    monkeypatch.undo()
    engine.prefill_choice.gpu.close()


def test_free_memory_is_counted_after_torch_has_given_back_its_own(monkeypatch):
    done = []

    def counted(name):
        done.append(name)
        return 5 << 30, 6 << 30

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda name: (done.append(name), (5 << 30, 0))[1]
    )
    assert stream_plan.free_memory_bytes(["cuda:0", "cuda:1"]) == 4 << 30
    assert done == ["emptied", "cuda:0", "cuda:1"]
    assert stream_plan.free_memory_bytes(["cpu"]) is None and len(done) == 3


def test_an_error_of_the_device_is_told_and_survived(open_streamed, monkeypatch):
    session = open_streamed(MINI).session()
    for error, named in (
        (torch.OutOfMemoryError("no room"), DoesNotFit),
        (RuntimeError("an illegal address\nCUDA kernel"), DeviceUnavailable),
        (_native.NativeError("device-copy-failed", "refused"), DeviceUnavailable),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(StreamPrefill, "run_layer", raises(error))
            with pytest.raises(named) as caught:
                answer(session, PROMPT)
            assert "CUDA" not in str(caught.value)
        session.rewind(0)
    assert len(answer(session, PROMPT)[0]) == 8


def test_a_prompt_that_goes_on_and_finds_no_room_is_told_so(open_streamed, monkeypatch):
    """Its hidden states are copied to the device before any layer runs."""
    session = open_streamed(MINI).session()
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        cancelled_after(session, PROMPT, 2)
    with monkeypatch.context() as patch:
        patch.setattr(Lane, "start_from", raises(torch.OutOfMemoryError("no room")))
        with pytest.raises(DoesNotFit, match=r"prompt does not fit.*--gpu-memory"):
            answer(session, PROMPT)


def test_memory_is_free_again_though_somebody_keeps_the_error(open_streamed, monkeypatch):
    session, held = open_streamed(MINI).session(), []

    def full(lane, layer):
        tensor = torch.zeros(10)
        held.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError("no room")

    free = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.append(held[0]() is None))
    monkeypatch.setattr(Lane, "_feed_forward", full)
    with pytest.raises(DoesNotFit) as caught:
        answer(session, PROMPT)
    assert free == [True] and caught.value.__cause__ is not None


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (torch.OutOfMemoryError("no room"), DoesNotFit),
        (RuntimeError("CUDA error: all devices are busy"), DeviceUnavailable),
    ],
)
def test_auto_does_without_a_gpu_that_cannot_be_opened(error, named, open_engine, monkeypatch):
    monkeypatch.setattr(device_names, "has_gpu_file", lambda: True)
    monkeypatch.setattr(gpus, "torch_devices", lambda device: ["cpu"])
    monkeypatch.setattr(gpus, "SMALL_MODEL_BYTES", 0)
    monkeypatch.setattr(stream_plan, "free_memory_bytes", raises(error))
    engine = open_engine(MINI, device="auto")
    assert engine.prefill_choice.gpu is None and "read by the CPU: the GPU" in engine.notice
    with pytest.raises(named, match="--device cpu"):
        open_engine(MINI, device="cuda")


def test_doctor_tells_of_a_gpu_that_fails(monkeypatch):
    monkeypatch.setattr(gpu_survey, "has_gpu_file", lambda: True)
    monkeypatch.setattr(gpu_survey, "torch_devices", lambda device: ["cuda:0"])
    monkeypatch.setattr(gpu_survey, "driver_names", lambda: ["A card"])
    monkeypatch.setattr(survey, "survey", raises(RuntimeError("CUDA error: busy\nmore")))
    facts = gpu_survey.gpu_facts()
    assert facts["gpus"] == [{"name": "A card"}] and facts["auto_device"] == "cpu"
    assert facts["why_cpu"] == "the GPU failed: CUDA error: busy. --device cpu works without it."


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_closes_nothing_of_its_parents_and_can_open_its_own(open_streamed):
    """Whatever a thread that stayed there holds."""
    engine = open_streamed(MINI, device="torch-cpu:2")
    want, _ = answer(engine.session(), PROMPT)
    taken, done = threading.Event(), threading.Event()

    def hold():
        with engine.prefill_choice.gpu.sources[0]._feeder._changed:
            taken.set()
            done.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    assert taken.wait(10)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)
        code = 1
        try:
            engine.close()
            own = Engine(MINI, device="torch-cpu:2", gpu_prefill_tokens=0, threads=2)
            code = int(answer(own.session(), PROMPT)[0] != want)
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    done.set()
    holder.join()
    assert os.waitstatus_to_exitcode(status) == 0
    assert answer(engine.session(), PROMPT)[0] == want


def test_close_ends_threads_and_streams(open_streamed):
    before = set(threading.enumerate())
    engine = open_streamed(MINI)
    answer(engine.session(), PROMPT)
    engine.close()
    assert set(threading.enumerate()) <= before
