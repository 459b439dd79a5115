"""Which device reads a prompt, by a number of tokens given or measured; and in what parts."""

from __future__ import annotations

import threading
import time

import pytest

from moechat.prefill.choice import USUAL_THRESHOLD_TOKENS, DeviceChoice
from moechat.prefill.packets import PacketThread


class Device:
    def __init__(self, name, max_tokens=None):
        self.name, self.max_tokens = name, max_tokens


CPU = Device("cpu")


def reader(choice, num_tokens):
    (part,) = choice.plan(num_tokens)
    assert part.num_tokens == num_tokens
    return part.device


def test_without_a_gpu_the_cpu_reads_all():
    choice = DeviceChoice(CPU, None, 0)
    assert reader(choice, 10**6) is CPU and choice.threshold_tokens is None


@pytest.mark.parametrize("threshold", [0, 1, 100])
def test_a_given_threshold_is_kept_whatever_is_measured(threshold):
    gpu = Device("gpu")
    choice = DeviceChoice(CPU, gpu, threshold)
    for _ in range(3):
        choice.measured(gpu, 1000, 1000.0)
        choice.measured(CPU, 1000, 0.001)
    assert reader(choice, max(threshold, 1)) is gpu
    if threshold > 1:
        assert reader(choice, threshold - 1) is CPU


def test_a_long_prompt_s_computing_is_not_taken_for_a_short_one_s():
    """Its copies are: shorter prompts would be the CPU's for good, and never be measured."""
    gpu = Device("gpu")
    choice = DeviceChoice(CPU, gpu)
    choice.measured(CPU, 100, 1.0)
    for _ in range(2):  # the first is not counted
        choice.measured(gpu, 100_000, 80.0, copy_seconds=13.0)
    assert choice.threshold_tokens == 1300
    choice.measured(gpu, 1500, 14.0, copy_seconds=13.0)  # now it is known
    assert choice.threshold_tokens == 1400


def test_copies_of_a_pass_bound_no_threshold_that_was_measured():
    gpu = Device("gpu")
    choice = DeviceChoice(CPU, gpu)
    choice.measured(CPU, 100, 1.0)
    for _ in range(2):
        choice.measured(gpu, 1100, 20.0, copy_seconds=13.0)
    assert choice.threshold_tokens == 2000


def test_a_measured_threshold_is_where_both_take_as_long():
    gpu = Device("gpu")
    choice = DeviceChoice(CPU, gpu)
    assert choice.threshold_tokens == USUAL_THRESHOLD_TOKENS
    choice.measured(gpu, 2000, 60.0)  # the first one page-locks the files
    choice.measured(CPU, 3, 10.0)  # too short to tell
    assert choice.threshold_tokens == USUAL_THRESHOLD_TOKENS
    choice.measured(CPU, 100, 2.0)
    choice.measured(gpu, 2000, 13.0)
    assert choice.threshold_tokens == 650
    choice.measured(gpu, 30_000, 26.0)  # a long prompt says nothing of a short one's pass
    assert choice.threshold_tokens == 650
    for _ in range(12):
        choice.measured(CPU, 100, 1.0)
        choice.measured(gpu, 2000, 10.0)
    assert choice.threshold_tokens == pytest.approx(1000, rel=0.01)
    assert reader(choice, 1100) is gpu and reader(choice, 900) is CPU


def test_what_does_not_fit_is_read_in_even_parts():
    gpu = Device("gpu", max_tokens=100)
    choice = DeviceChoice(CPU, gpu, 0)
    for num_tokens in (1, 99, 100, 101, 250, 301):
        sizes = [part.num_tokens for part in choice.plan(num_tokens)]
        assert sum(sizes) == num_tokens and max(sizes) <= 100
        assert max(sizes) - min(sizes) <= 1 and len(sizes) == -(-num_tokens // 100)


def test_one_packet_waits_beside_the_one_under_way():
    packets, gate, sent = PacketThread(), threading.Event(), []

    def send(number):
        gate.wait(10)
        sent.append(number)
        return True

    assert packets.put(lambda: send(0)) and packets.put(lambda: send(1))
    third = threading.Thread(target=packets.put, args=(lambda: send(2),))
    third.start()
    time.sleep(0.05)
    assert third.is_alive() and sent == []
    gate.set()
    third.join(10)
    assert packets.flush() and sent == [0, 1, 2]
    packets.close()


@pytest.mark.parametrize("how", ["no", "error"])
def test_after_a_packet_that_was_not_sent_no_other_is(how):
    packets, sent = PacketThread(), []

    def fail():
        if how == "error":
            raise MemoryError("no room")
        return False

    packets.put(fail)
    for number in range(5):
        packets.put(lambda number=number: sent.append(number) is None)
    if how == "error":
        with pytest.raises(MemoryError):
            packets.flush()
    else:
        assert not packets.flush()
    assert sent == []
    assert packets.put(lambda: True) and packets.flush()  # and then all is well again
    packets.close()
