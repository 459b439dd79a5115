"""How many experts decode's GPU holds: what fits, what is refused, what "auto" makes of it."""

from __future__ import annotations

import re

import pytest
from oracles import MINI, oracle_folder

from moechat.errors import BadParameter, DoesNotFit

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")

from moechat.decode.gpu.expert_slots import ExpertSlots  # noqa: E402
from moechat.decode.gpu.hot_experts import bytes_of_one_each  # noqa: E402
from moechat.engine.gpu_experts import experts_to_hold  # noqa: E402
from moechat.engine.gpu_room import GpuRoom  # noqa: E402
from moechat.gpu_weights.stored import StoredWeights  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_torch_thread")

WITH_GPU = {"device": "torch-cpu", "gpu_prefill_tokens": 0, "gpu_decode": "on"}
OF_MINI = 5 * 3 * (128 * 384 + 3 * 4)  # bytes of an expert of each layer, its scales included


def room(engine):
    return engine.decode.device.num_gpu_experts


def test_values_that_make_no_sense(open_engine):
    for value in (-1, "all", ""):
        with pytest.raises(BadParameter, match="gpu_experts cannot be"):
            open_engine(MINI, gpu_experts=value, **WITH_GPU)
    for more in ({}, {"device": "torch-cpu"}, {"device": "cpu", "gpu_decode": "auto"}):
        with pytest.raises(BadParameter, match=r"gpu_experts cannot be 4.*--gpu-decode on"):
            open_engine(MINI, gpu_experts=4, **more)
        assert open_engine(MINI, gpu_experts="auto", **more).decode.device is None
        assert open_engine(MINI, gpu_experts=0, **more).decode.device is None
    with pytest.raises(BadParameter, match=r"33 experts.*the model has 32.*up to 32"):
        open_engine(MINI, gpu_experts=33, **WITH_GPU)


@pytest.mark.parametrize("name,why", [("gpt_oss_mxfp4", "biases"), ("llama", "no routed experts")])
def test_models_whose_experts_cannot_be_held(name, why, open_engine):
    folder = oracle_folder(name)
    with pytest.raises(BadParameter, match=f"held on the GPU: .*{why}.*Leave out --gpu-experts"):
        open_engine(folder, gpu_experts=1, **WITH_GPU)
    memory = {"gpu_memory_bytes": 4_000_000_000}
    assert room(open_engine(folder, gpu_experts="auto", **memory, **WITH_GPU)) == 0


def test_a_number_that_does_not_fit_says_which_does(open_engine):
    def open_(number):
        return open_engine(MINI, gpu_experts=number, gpu_memory_bytes=64_000_000, **WITH_GPU)

    with pytest.raises(
        DoesNotFit, match=r"32 experts a layer do not fit.*may be up to (\d+)"
    ) as error:
        open_(32)
    fits = int(re.search(r"up to (\d+)", error.value.next_step)[1])
    assert 0 < fits < 32
    engine = open_(fits)
    assert room(engine) == fits
    assert engine.decode.device.hot.num_bytes == fits * OF_MINI
    with pytest.raises(DoesNotFit, match=f"{fits + 1} experts a layer do not fit"):
        open_(fits + 1)
    with pytest.raises(DoesNotFit):
        open_engine(MINI, gpu_experts=1, gpu_memory_bytes=20_000_000, **WITH_GPU)


def test_auto_leaves_the_reading_of_prompts_as_it_is(open_engine):
    found = []
    for memory_bytes in (None, 64_000_000, 100_000_000, 130_000_000, 250_000_000, 400_000_000):
        settings = {"gpu_memory_bytes": memory_bytes, **WITH_GPU}
        readers = []
        for number in (0, "auto"):
            engine = open_engine(MINI, gpu_experts=number, **settings)
            readers.append(engine.prefill_choice.gpu.max_tokens)
        assert readers[0] == readers[1]
        found.append(room(engine))
        assert room(engine) * OF_MINI < (memory_bytes or 1)
    assert found[0] == 0 and found[-1] == 32
    assert any(0 < number < 32 for number in found)


def test_memory_that_others_have_taken(open_engine, monkeypatch):
    """torch finds less than was planned with."""
    real = ExpertSlots.__init__

    def slots(self, stack, count, **settings):
        if count > 10:
            raise torch.OutOfMemoryError("no room")
        real(self, stack, count, **settings)

    monkeypatch.setattr(ExpertSlots, "__init__", slots)
    memory = {"gpu_memory_bytes": 400_000_000}
    assert room(open_engine(MINI, gpu_experts="auto", **memory, **WITH_GPU)) == 8
    with pytest.raises(DoesNotFit, match=r"11 experts a layer do not fit.*Lower --gpu-experts"):
        open_engine(MINI, gpu_experts=11, **memory, **WITH_GPU)


@pytest.mark.parametrize("decode", ["auto", "on"])
def test_a_notice_where_no_gpu_takes_part_in_answers(decode, open_engine):
    settings = WITH_GPU | {"gpu_decode": decode, "gpu_memory_bytes": 400_000_000}
    engine = open_engine(MINI, gpu_experts=2, **settings)
    told = "no experts are kept on a GPU" in engine.notice
    assert told == (engine.decode.device is None) == (decode == "auto")
    assert open_engine(MINI, gpu_experts="auto", **settings).notice == ""


def test_bytes_of_a_number(open_engine):
    engine = open_engine(MINI, device="torch-cpu")
    weights = StoredWeights.of(engine.model.tensors)
    assert bytes_of_one_each(weights, "bf16") == OF_MINI
    assert bytes_of_one_each(weights, "exact") == 4 * 5 * 3 * 128 * 384
    for wanted in (0, 5):
        found = experts_to_hold(
            wanted, engine.model, GpuRoom(None, None, 0, 0), compute="bf16", context_tokens=100
        )
        assert found == wanted
