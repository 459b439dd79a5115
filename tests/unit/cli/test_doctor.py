"""``moechat doctor`` on machines with and without GPUs, which are made up."""

import json

import pytest

from moechat.engine import gpu_survey
from moechat.errors import DeviceUnavailable


def gpu(number, rate):
    return {
        "device": f"cuda:{number}",
        "name": "Some GPU",
        "compute_capability": "9.0",
        "memory_bytes": 24 * 10**9,
        "free_bytes": 20 * 10**9,
        "link_bytes_per_second": rate,
    }


def test_a_machine_without_a_gpu(moechat, monkeypatch):
    monkeypatch.setattr(gpu_survey, "has_gpu_file", lambda: False)
    result = moechat("doctor")
    assert (result.code, result.stderr) == (0, "")
    assert "prompts" in result.stdout and "read by the CPU: there is no GPU" in result.stdout
    facts = json.loads(moechat("doctor", "--json").stdout)
    assert (facts["gpus"], facts["auto_device"]) == ([], "cpu")
    assert facts["machine"]["usable_cpus"] >= 1 and facts["instruction_set"]


def test_gpus_are_named_with_their_rates(moechat, monkeypatch):
    facts = {"gpus": [gpu(0, 51.2e9), gpu(1, None)], "auto_device": "cuda:0", "why_cpu": ""}
    monkeypatch.setattr(gpu_survey, "gpu_facts", lambda: facts)
    lines = moechat("doctor").stdout.splitlines()
    (first,) = (line for line in lines if line.startswith("GPU cuda:0"))
    assert "Some GPU, 20 GB of 24 GB free, compute capability 9.0, weights at 51.2 GB/s" in first
    (second,) = (line for line in lines if line.startswith("GPU cuda:1"))
    assert "not measured" in second
    assert "read by cuda:0" in lines[-1]


@pytest.mark.parametrize("drivers", [(), ("Model: \t\t Some GPU\nIRQ: 1\n",)])
def test_a_gpu_without_torch_is_told_what_to_install(drivers, moechat, monkeypatch, tmp_path):
    def no_torch(device):
        raise DeviceUnavailable("a GPU cannot be used without torch", "", "Install it")

    for number, text in enumerate(drivers):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "information").write_text(text)
    monkeypatch.setattr(gpu_survey, "_DRIVER_FILES", f"{tmp_path}/*/information")
    monkeypatch.setattr(gpu_survey, "has_gpu_file", lambda: True)
    monkeypatch.setattr(gpu_survey, "torch_devices", no_torch)
    shown = moechat("doctor").stdout
    assert "read by the CPU: a GPU cannot be used without torch. Install it." in shown
    assert ("Some GPU" in shown) == bool(drivers)
