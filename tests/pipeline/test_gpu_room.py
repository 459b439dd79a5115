"""What fits into a GPU's memory, and what is said where it does not. No torch."""

from __future__ import annotations

import pytest

from moechat.cli.device_options import _memory
from moechat.engine.gpu_room import GpuRoom, memory_text
from moechat.errors import DoesNotFit

MB = 10**6


def room(memory=100 * MB, free=None, decode=20 * MB, stream=30 * MB):
    return GpuRoom(memory, free, decode, stream)


def test_auto_wants_half_of_the_memory_for_decode_and_room_for_prompts_beside_it():
    assert room().is_ample()  # 20 + 12.5 of 100
    assert not room(decode=38 * MB).is_ample()  # 50.5
    assert not room(decode=37 * MB, stream=51 * MB).is_ample()  # fits the half; prompts do not
    assert not room(memory=None).is_ample()


@pytest.mark.parametrize("decode", [False, True])
def test_what_is_said_to_be_enough_is_enough(decode):
    with pytest.raises(DoesNotFit) as caught:
        room(memory=29 * MB).check(decode=decode)
    said = caught.value.next_step.split(" is enough")[0].removeprefix("--gpu-memory ")
    enough = _memory(said)
    room(memory=enough).check(decode=decode)
    with pytest.raises(DoesNotFit):
        room(memory=enough - 2 * MB).check(decode=decode)
    weights = 50 * MB if decode else 30 * MB
    assert enough - (enough // 8 if decode else 0) >= weights


def test_what_helps_depends_on_what_is_there():
    def advice(decode, **sizes):
        with pytest.raises(DoesNotFit) as caught:
            room(**sizes).check(decode=decode)
        return caught.value.next_step

    assert advice(True, memory=40 * MB) == (
        "--gpu-memory 58MB is enough, or leave answers to the CPU: --gpu-decode off"
    )
    assert advice(True, memory=10 * MB).endswith("--device cpu, without --gpu-decode on")
    assert advice(False, memory=10 * MB, free=29 * MB).startswith("Only 29 MB of it are free; use")
    assert advice(True, memory=40 * MB, free=40 * MB).startswith("Leave answers to the CPU")
    room(memory=None).check(decode=True)


def test_held_experts_are_counted():
    """Beside decode's weights, KV caches and the least for prompts: 37.5 MB are for them."""
    room().check_experts(0, 5 * MB)
    room().check_experts(7, 5 * MB)
    assert room().prompt_bytes(decode=True, held_bytes=35 * MB) == 32_500_000
    assert room().prompt_bytes(decode=False) == 100 * MB
    assert room(memory=None).prompt_bytes(decode=True) is None
    room(memory=None).check_experts(100, 5 * MB)
    with pytest.raises(DoesNotFit) as caught:
        room().check_experts(8, 5 * MB)
    assert caught.value.what == "8 experts a layer do not fit the GPU's memory"
    assert caught.value.why == (
        "they take 40 MB, and 67.5 MB are left for them and for reading prompts"
    )
    assert caught.value.next_step == "--gpu-experts may be up to 7, or auto"
    with pytest.raises(DoesNotFit, match="Leave out --gpu-experts"):
        room().check_experts(1, 38 * MB)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (1, "1MB"), (33_300_001, "34MB"), (999 * MB, "999MB"), (999 * MB + 1, "1GB"),
        (12_340 * MB, "12.4GB"), (20_000 * MB, "20GB"),
    ],
)  # fmt: skip
def test_memory_is_said_as_the_option_takes_it(num_bytes, text):
    assert memory_text(num_bytes) == text and _memory(text) >= num_bytes
