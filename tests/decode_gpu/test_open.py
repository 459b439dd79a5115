"""Whether decode on a device finds room there, by what its weights take and not what is stored."""

from __future__ import annotations

import pytest
from draft_models import agreeing_folder
from oracles import MINI

from moechat.engine.gpus import _stored_bytes
from moechat.errors import BadParameter, DoesNotFit

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")

from moechat.decode.gpu import hybrid_loop  # noqa: E402

SETTINGS = {"threads": 1, "device": "torch-cpu", "compute": "exact"}


def test_weights_that_grow_are_counted_as_they_are(open_engine):
    roomy = open_engine(MINI, gpu_decode="on", **SETTINGS)
    stored, taken = _stored_bytes(roomy.model), roomy.decode.device.weights.num_bytes
    # An eighth is for KV, and half of all is the most that is taken: room for 3/8 of it.
    little, enough = taken * 5 // 2, taken * 4
    assert stored < little * 3 // 8 < taken < enough * 3 // 8
    auto = {"gpu_decode": "auto", **SETTINGS}
    assert open_engine(MINI, gpu_memory_bytes=little, **auto).decode.device is None
    assert open_engine(MINI, gpu_memory_bytes=enough, **auto).decode.device is not None


@pytest.mark.parametrize("wanted", ["auto", "on"])
def test_memory_that_is_not_there_after_all(open_engine, monkeypatch, wanted):
    def refuse(*args, **settings):
        raise torch.OutOfMemoryError("out of luck")

    monkeypatch.setattr(hybrid_loop, "ResidentWeights", refuse)
    settings = {"gpu_decode": wanted, "gpu_memory_bytes": 1 << 32, **SETTINGS}
    if wanted == "auto":
        assert open_engine(MINI, **settings).decode.device is None
        return
    with pytest.raises(DoesNotFit, match="gpu-decode off"):
        open_engine(MINI, **settings)


def test_no_memory_is_taken_for_steps_that_speculation_leaves_to_the_cpu(open_engine):
    settings = {"speculate": True, "gpu_memory_bytes": 1 << 32, **SETTINGS}
    engine = open_engine(agreeing_folder(), gpu_decode="auto", **settings)
    assert engine.decode.device is None and engine.prefill_choice.gpu is not None
    with pytest.raises(BadParameter, match="speculat"):
        open_engine(agreeing_folder(), gpu_decode="on", **settings)
