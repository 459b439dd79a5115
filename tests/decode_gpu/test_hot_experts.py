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


@pytest.mark.parametrize("name", ["deepseek_v3_fp8_odd", "deepseek_v3_bf16", "mixtral", "olmoe"])
@pytest.mark.parametrize("all_of_them", [False, True])
def test_tokens_are_those_of_transformers(open_engine, name, all_of_them):
    folder = oracle_folder(name)
    engine = open_engine(folder, compute="exact")
    spec, random = engine.spec, np.random.default_rng(3)
    count = spec.moe.num_experts
    hot = {
        layer: sorted(random.permutation(count)[: count if all_of_them else count // 2].tolist())
        for layer, each in enumerate(spec.layers)
        if each.moe
    }
    hybrid = with_hybrid(engine, folder, gpu_experts=hot)
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
        with_hybrid(engine, folder, gpu_experts={0: [1]})


def test_most_used():
    ids_TK = np.array([[3, 1], [3, 2], [5, 1], [3, 4]], np.int32)
    assert most_used(ids_TK, 6, 2) == [1, 3]
    assert most_used(ids_TK, 6, 3) == [1, 2, 3]
    assert most_used(ids_TK, 6, 2, first=[0]) == [0, 3]
    assert most_used(ids_TK, 6, 6) == list(range(6))


def test_kernels_in_the_interpreter():
    pytest.importorskip("triton", reason="triton is not installed")
    found = interpret(str(Path(__file__).with_name("interpreted_hot.py")))
    assert found.count("ok") == 10
