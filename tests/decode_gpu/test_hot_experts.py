"""Routed experts that the device has: the same sums as the CPU's, whoever computes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from interpreter_process import interpret
from oracles import expected, oracle_folder

from moechat import SamplingParams
from moechat.errors import BadParameter

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'moechat[gpu]'")
from hybrid_engine import with_hybrid  # noqa: E402

from moechat.decode.gpu.hot_experts import most_used  # noqa: E402


def uses_of(engine, chosen):
    """Prompts that used these experts of a layer, and no other."""
    uses_E = np.zeros(engine.spec.moe.num_experts, np.int64)
    uses_E[chosen] = 1
    return {layer: uses_E for layer, each in enumerate(engine.spec.layers) if each.moe}


@pytest.mark.parametrize("name", ["deepseek_v3_fp8_odd", "deepseek_v3_bf16", "mixtral", "olmoe"])
@pytest.mark.parametrize("all_of_them", [False, True])
def test_tokens_are_those_of_transformers(open_engine, name, all_of_them):
    folder = oracle_folder(name)
    engine = open_engine(folder, compute="exact")
    count = engine.spec.moe.num_experts
    number = count if all_of_them else count // 2
    hybrid = with_hybrid(engine, folder, gpu_experts=number)
    hybrid.prompt_read(uses_of(engine, np.random.default_rng(3).permutation(count)[:number]))
    hybrid.hot.advance()
    assert hybrid.num_held_experts == hybrid.num_gpu_experts == number
    want = expected(folder)
    session = engine.session()
    params = SamplingParams(temperature=0, max_tokens=24, ignore_end=True)
    events = session.generate(want["prompt_1_ids"].tolist(), params)
    tokens = [event.token_id for event in events if event.token_id is not None]
    assert tokens == want["prompt_1_greedy"].tolist()
    answers = [lane.mailbox.y.abs().max() for lane in hybrid.lanes[:1]]
    assert all((answer == 0) == all_of_them for answer in answers)


def test_experts_with_biases_are_refused(open_engine):
    folder = oracle_folder("gpt_oss_bf16")
    engine = open_engine(folder)
    with pytest.raises(BadParameter, match="biases"):
        with_hybrid(engine, folder, gpu_experts=1)


def test_most_used():
    uses_E = np.array([0, 3, 2, 3, 1, 1])
    assert most_used(uses_E, 2) == [1, 3]
    assert most_used(uses_E, 4) == [1, 3, 2, 4]
    assert most_used(uses_E, 5, held=[5, 0]) == [1, 3, 2, 5, 4]
    assert most_used(uses_E, 6) == [1, 3, 2, 4, 5, 0]


def test_kernels_in_the_interpreter():
    pytest.importorskip("triton", reason="triton is not installed")
    found = interpret(str(Path(__file__).with_name("interpreted_hot.py")))
    assert found.count("ok") == 10
