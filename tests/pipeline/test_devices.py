"""Which device reads prompts: names, what is missing, and what "auto" makes of it. No torch."""

from __future__ import annotations

import importlib
import types
import warnings

import pytest
from oracles import MINI

from moechat.engine import device_names, devices, gpus
from moechat.engine import engine as engine_module
from moechat.errors import BadParameter, DeviceUnavailable


def fake_torch(monkeypatch, *, count, built=True, version="2.13.0+cu130"):
    """importlib finds this torch; None: it finds none."""
    torch = types.SimpleNamespace(
        cuda=types.SimpleNamespace(is_available=lambda: bool(count), device_count=lambda: count),
        version=types.SimpleNamespace(cuda="13.0" if built else None),
        __version__=version,
    )
    real = importlib.import_module

    def find(name, *more):
        if name != "torch":
            return real(name, *more)
        if count is None:
            raise ImportError("No module named 'torch'")
        return torch

    monkeypatch.setattr(importlib, "import_module", find)


@pytest.mark.parametrize(
    "device",
    [
        *("", "gpu", "cuda:", "cuda:0,", "cuda:0;cuda:1", "cpu,cuda:0", "cuda:all,cuda:0", "\n"),
        *("cuda:\N{ARABIC-INDIC DIGIT ONE}", "cuda:0,cuda:\N{FULLWIDTH DIGIT ONE}"),
    ],
)
def test_other_names_are_refused(device, open_engine):
    with pytest.raises(BadParameter, match="device cannot be"):
        open_engine(MINI, device=device)


@pytest.mark.parametrize("device", ["cuda:0,cuda:0", "cuda:0,cuda:1,cuda:00"])
def test_a_gpu_named_twice_is_refused_before_anything_is_loaded(device, open_engine, monkeypatch):
    monkeypatch.setattr(engine_module, "load_model", None)
    monkeypatch.setattr(engine_module, "open_gpus", None)
    with pytest.raises(BadParameter, match="every GPU once"):
        open_engine(MINI, device=device)


@pytest.mark.parametrize(
    ("device", "names"),
    [
        ("auto", ["cuda:0"]),
        ("cuda", ["cuda:0"]),
        ("cuda:1", ["cuda:1"]),
        ("cuda:1,cuda:0", ["cuda:1", "cuda:0"]),
        ("cuda:01,cuda:000", ["cuda:1", "cuda:0"]),  # torch takes no leading zeros
        ("cuda:all", ["cuda:0", "cuda:1"]),
    ],
)
def test_names_of_devices(device, names, monkeypatch):
    fake_torch(monkeypatch, count=2)
    assert devices.torch_devices(device) == names


def test_what_is_missing_is_named(monkeypatch):
    for count, built, text in (
        (None, True, r"without torch.*pip install 'moechat\[gpu\]'"),
        (0, False, "without CUDA"),
        (0, True, "driver"),
    ):
        with monkeypatch.context() as patch:
            fake_torch(patch, count=count, built=built)
            with pytest.raises(DeviceUnavailable, match=text):
                devices.torch_devices("cuda")
    fake_torch(monkeypatch, count=1)
    with pytest.raises(DeviceUnavailable, match="no cuda:1: this machine has 1"):
        devices.torch_devices("cuda:0,cuda:1")


@pytest.mark.parametrize("version", ["2.7.1+cu128", "2.6.0", "1.13"])
def test_an_older_torch_is_refused_by_name(version, monkeypatch):
    fake_torch(monkeypatch, count=1, version=version)
    with pytest.raises(DeviceUnavailable, match=r"newer torch: this is .*, and 2\.8 is needed"):
        devices.torch_devices("cuda")
    for new in ("2.8.0", "2.10.0a0+git1234", "3.0", "unknown"):
        fake_torch(monkeypatch, count=1, version=new)
        assert devices.torch_devices("cuda") == ["cuda:0"]


@pytest.mark.parametrize("error", [OSError("libcudart.so.12: lost"), ValueError("libcublas")])
def test_a_torch_that_does_not_load_is_named(error, monkeypatch, open_engine):
    def find(name, *more):
        raise error

    monkeypatch.setattr(devices.importlib, "import_module", find)
    with pytest.raises(DeviceUnavailable, match=r"does not load: lib.*--device cpu"):
        devices.torch_devices("cuda")
    monkeypatch.setattr(device_names, "has_gpu_file", lambda: True)
    monkeypatch.setattr(gpus, "SMALL_MODEL_BYTES", 0)
    assert "read by the CPU: torch is here" in open_engine(MINI, device="auto").notice


def test_what_torch_warns_of_is_not_shown(monkeypatch, recwarn):
    def is_available():
        warnings.warn("the driver is too old", stacklevel=1)
        return False

    fake_torch(monkeypatch, count=0)
    monkeypatch.setattr(importlib.import_module("torch").cuda, "is_available", is_available)
    with pytest.raises(DeviceUnavailable, match="too old"):
        devices.torch_devices("auto")
    assert not recwarn.list


def test_auto_is_the_cpu_where_no_gpu_is(open_engine, monkeypatch):
    monkeypatch.setattr(device_names, "has_gpu_file", lambda: False)
    monkeypatch.setattr(engine_module, "open_gpus", None)
    engine = open_engine(MINI, device="auto")
    assert engine.prefill_choice.gpu is None and engine.notice == ""


def test_auto_tells_why_a_gpu_is_not_used(open_engine, monkeypatch):
    monkeypatch.setattr(device_names, "has_gpu_file", lambda: True)
    fake_torch(monkeypatch, count=0, built=False)
    engine = open_engine(MINI, device="auto")  # small: the CPU's anyway
    assert engine.prefill_choice.gpu is None and engine.notice == ""
    monkeypatch.setattr(gpus, "SMALL_MODEL_BYTES", 0)
    engine = open_engine(MINI, device="auto")
    assert engine.prefill_choice.gpu is None
    assert "read by the CPU: there is no GPU" in engine.notice


def test_decode_on_a_gpu_is_an_error_where_it_cannot_be(open_engine, monkeypatch):
    monkeypatch.setattr(device_names, "has_gpu_file", lambda: False)
    with pytest.raises(DeviceUnavailable, match=r"--gpu-decode on.*there is no GPU.*doctor"):
        open_engine(MINI, device="auto", gpu_decode="on")
    monkeypatch.setattr(device_names, "has_gpu_file", lambda: True)
    for count, built, text in ((None, True, "without torch"), (0, False, "without CUDA")):
        with monkeypatch.context() as patch:
            fake_torch(patch, count=count, built=built)
            with pytest.raises(DeviceUnavailable, match=f"--gpu-decode on.*{text}.*doctor"):
                open_engine(MINI, device="auto", gpu_decode="on")
    with pytest.raises(BadParameter, match="speculation is the CPU's"):
        open_engine(MINI, device="cuda", gpu_decode="on", speculate=True)


def test_auto_tells_that_the_cpu_decodes_too(open_engine, monkeypatch):
    monkeypatch.setattr(device_names, "has_gpu_file", lambda: True)
    monkeypatch.setattr(gpus, "SMALL_MODEL_BYTES", 0)
    fake_torch(monkeypatch, count=0)
    engine = open_engine(MINI, device="auto", gpu_decode="auto")
    assert "prompts are read and answers written by the CPU: there is no GPU" in engine.notice


def test_numbers_out_of_range_are_refused(open_engine):
    with pytest.raises(BadParameter, match="gpu_prefill_tokens cannot be -1"):
        open_engine(MINI, gpu_prefill_tokens=-1)
    with pytest.raises(BadParameter, match="gpu_decode cannot be 'on'"):
        open_engine(MINI, gpu_decode="on")
    with pytest.raises(BadParameter, match="gpu_memory_bytes cannot be 0"):
        open_engine(MINI, gpu_memory_bytes=0)
