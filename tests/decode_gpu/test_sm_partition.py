"""Tests of decode/gpu/sm_partition.py, without a GPU: who has which part, and when."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from moechat.decode.gpu import sm_partition
from moechat.decode.gpu.sm_partition import GpuSharing, Parts

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(sm_partition.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    streams: list[str] = []

    @contextlib.contextmanager
    def on(stream: str) -> Iterator[None]:
        streams.append(stream)
        yield

    monkeypatch.setattr(sm_partition, "_on", on)
    return streams


def parts(device: torch.device) -> Parts:
    return Parts("decode's", "the prompt's")


def test_each_has_the_whole_device_alone(clock: list[float], entered: list[str]) -> None:
    sharing = GpuSharing(CPU, parts)
    assert not sharing.beside_a_prompt
    clock[0] += 1
    with sharing.layer():
        pass
    assert not entered
    clock[0] += 1
    assert not sharing.beside_a_prompt


def test_both_have_their_parts_together(clock: list[float], entered: list[str]) -> None:
    sharing = GpuSharing(CPU, parts)
    with sharing.layer():
        clock[0] += 20.0  # a long layer
        assert sharing.beside_a_prompt
    assert sharing.beside_a_prompt  # the next layer comes soon
    with sharing.layer():
        pass
    assert entered == ["the prompt's"]
    clock[0] += 1
    assert not sharing.beside_a_prompt


def test_a_layer_that_fails_is_over(clock: list[float], entered: list[str]) -> None:
    sharing = GpuSharing(CPU, parts)
    with pytest.raises(RuntimeError), sharing.layer():
        raise RuntimeError
    clock[0] += 1
    assert not sharing.beside_a_prompt


def test_without_parts(clock: list[float], entered: list[str]) -> None:
    def refused(device: torch.device) -> Parts:
        raise RuntimeError("cuGreenCtxCreate: CUDA error 801")

    for sharing in (GpuSharing(CPU), GpuSharing(CPU, refused)):
        assert sharing.parts is None
        with sharing.layer():
            assert not sharing.beside_a_prompt
        with sharing.layer():
            pass
    assert not entered
