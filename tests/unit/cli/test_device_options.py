"""What stderr hears of options that choose devices."""

from __future__ import annotations

import os

import pytest


@pytest.mark.parametrize("verb", [("run", "mini", "q"), ("batch", os.devnull)])
def test_options_of_a_gpu_that_do_nothing_are_named_on_stderr(moechat, verb):
    both = ("--gpu-memory", "20GB", "--gpu-prefill-tokens", "0")
    result = moechat(*verb, *both, "--device", "cpu")
    assert result.stderr == (
        "--gpu-memory and --gpu-prefill-tokens do nothing: no GPU is used (--device cpu)\n"
    )
    assert result.code == 0 and "gpu" not in result.stdout
    assert "--gpu-experts does nothing: " in moechat(*verb, "--gpu-experts", "auto").stderr
    assert "--gpu-memory does nothing: " in moechat(*verb, *both[:2]).stderr
    assert moechat(*verb, "--device", "cpu", "--gpu-decode", "off").stderr == ""
    moechat.engine.prefill_choice.gpu = object()
    assert moechat(*verb, *both).stderr == ""


def test_options_of_devices_reach_the_engine(moechat):
    moechat("run", "mini", "--device", "cuda:0,cuda:1", "--gpu-memory", "1.5GiB", "q")
    assert moechat.engine.settings["device"] == "cuda:0,cuda:1"
    assert moechat.engine.settings["gpu_memory_bytes"] == 3 << 29
    moechat("run", "mini", "--gpu-prefill-tokens", "0", "q")
    assert moechat.engine.settings["gpu_prefill_tokens"] == 0
    for text, value in (("0", 0), ("12", 12), ("auto", "auto")):
        moechat("run", "mini", "--gpu-experts", text, "q")
        assert moechat.engine.settings["gpu_experts"] == value
