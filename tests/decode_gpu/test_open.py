"""Whether decode on a device finds room there, by what its weights take and not what is stored."""

from __future__ import annotations

import pytest
from draft_models import agreeing_folder
from oracles import MINI

from moechat.engine import gpus
from moechat.engine.gpu_room import GpuRoom
from moechat.errors import BadParameter, DoesNotFit

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")

from moechat.decode.gpu import hybrid_loop  # noqa: E402

SETTINGS = {"threads": 1, "device": "torch-cpu", "compute": "exact"}


def test_weights_that_grow_are_counted_as_they_are(open_engine):
    engine = open_engine(MINI, gpu_decode="on", **SETTINGS)
    taken = engine.decode.device.weights.num_bytes

    def room(memory_bytes, compute="exact"):
        return GpuRoom.of(
            ["cpu"], engine.model, compute=compute, memory_bytes=memory_bytes, context_tokens=100
        )

    assert room(None).decode_bytes == taken > room(None, "bf16").decode_bytes
    assert room(None, "w8a8") == room(None, "bf16")
    # An eighth is for KV, and half of all is the most that is taken: room for 3/8 of it.
    little, enough = taken * 5 // 2, taken * 4
    assert room(little, "bf16").decode_bytes < little * 3 // 8 < taken < enough * 3 // 8
    assert not room(little).is_ample() and room(enough).is_ample()


@pytest.mark.parametrize("wanted", ["auto", "on"])
def test_memory_that_is_not_there_after_all(open_engine, monkeypatch, wanted):
    def refuse(*args, **settings):
        raise torch.OutOfMemoryError("out of luck")

    monkeypatch.setattr(hybrid_loop, "ResidentWeights", refuse)
    if wanted == "auto":
        engine, room = open_engine(MINI, **SETTINGS), GpuRoom(1 << 32, None, 0, 0)
        assert gpus._open_decode("auto", "cpu", engine.model, engine.pool, "exact", room) is None
        return
    with pytest.raises(DoesNotFit, match=r"not fit its memory: out of luck.*gpu-decode off"):
        open_engine(MINI, gpu_decode=wanted, gpu_memory_bytes=1 << 32, **SETTINGS)


def test_no_memory_is_taken_for_steps_that_speculation_leaves_to_the_cpu(open_engine):
    settings = {"speculate": True, "gpu_memory_bytes": 1 << 32, **SETTINGS}
    engine = open_engine(agreeing_folder(), gpu_decode="auto", **settings)
    assert engine.decode.device is None and engine.prefill_choice.gpu is not None
    with pytest.raises(BadParameter, match="speculat"):
        open_engine(agreeing_folder(), gpu_decode="on", **settings)
