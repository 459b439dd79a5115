"""The engine with resident weights: the same answers, on as many nodes as there are (faked)."""

from __future__ import annotations

import gc
import re

import numpy as np
import pytest
from draft_models import agreeing_folder
from oracles import MINI, expected, oracle_folder

from moechat import SamplingParams
from moechat.engine import resident
from moechat.errors import DoesNotFit

TWO_NODES = [(-1, []), (-1, [])]
EXACT_BOUND = 1e-3  # as in tests/models/test_oracles.py
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_end=True)


def memory_bytes(path=""):
    """Resident bytes of this process's mappings of files below ``path``; of no file without it."""
    gc.collect()
    total, counted = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            fields = line.split(maxsplit=5)
            if re.fullmatch("[0-9a-f]+-[0-9a-f]+", fields[0]):
                name = fields[5] if len(fields) == 6 else ""
                counted = name.startswith(path) if path else name == ""
            elif counted and fields[0] == "Rss:":
                total += int(fields[1]) * 1024
    return total


@pytest.mark.parametrize("name", ["deepseek_v3_fp8_256", "gpt_oss_mxfp4"])
@pytest.mark.parametrize("num_nodes", [2, 3])
def test_oracles_on_faked_nodes(name, num_nodes, open_engine):
    folder = oracle_folder(name)
    want = expected(folder)
    nodes = [(-1, [])] * num_nodes
    engine = open_engine(folder, compute="exact", resident=True, nodes=nodes)
    assert len(engine.residency.node_bytes) == num_nodes and engine.residency.num_mapped == 0
    for prompt in range(3):
        ids = want[f"prompt_{prompt}_ids"].tolist()
        logits = engine.session().extend(ids)
        assert np.abs(logits[-1] - want[f"prompt_{prompt}_last_logits"]).max() <= EXACT_BOUND
        events = list(engine.session().generate(ids, GREEDY))
        tokens = [event.token_id for event in events if event.token_id is not None]
        assert tokens == want[f"prompt_{prompt}_greedy"].tolist()


@pytest.mark.parametrize("name", ["deepseek_v3_fp8_256", "gpt_oss_mxfp4"])
def test_on_one_node_the_bits_are_those_of_the_mapping(name, open_engine):
    ids = list(range(3, 40))
    mapped = open_engine(oracle_folder(name))
    own = open_engine(oracle_folder(name), resident=True, nodes=[(-1, [])])
    for piece in (ids, ids[:5]):
        wanted = mapped.session().extend(piece)
        assert own.session().extend(piece).tobytes() == wanted.tobytes()


def test_the_draft_layer_is_resident_too(open_engine):
    folder, texts = agreeing_folder(), []
    for nodes in (TWO_NODES, TWO_NODES[:1]):
        engines = [
            open_engine(folder, resident=True, nodes=nodes, speculate=speculate)
            for speculate in (False, True)
        ]
        plain, drafting = (engine.residency for engine in engines)
        num_experts = engines[0].spec.moe.num_experts + 1  # the shared one
        assert drafting.num_resident == plain.num_resident + num_experts
        assert drafting.num_mapped == plain.num_mapped == 0
        for engine in engines:
            *events, last = engine.session().generate(list(range(5, 20)), GREEDY)
            texts.append([event.token_id for event in events if event.token_id is not None])
        assert last.stats.accepted > 0
        assert texts[-1] == texts[-2]


def test_memory_is_held_once_and_given_back(open_engine):
    """The copies are anonymous, the files' pages are let go, and close() frees the copies."""
    before = memory_bytes()
    steps = []
    engine = open_engine(
        MINI, resident=True, nodes=TWO_NODES, progress=lambda *step: steps.append(step)
    )
    total = sum(engine.residency.node_bytes)
    assert total > 20e6 and steps[-1] == (total, total)
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert memory_bytes() - before > 0.9 * total
    assert memory_bytes(str(MINI)) < 0.1 * total
    assert " MB + " in engine.residency.line
    list(engine.session().generate([5, 6], SamplingParams(max_tokens=2, ignore_end=True)))
    engine.close()
    assert memory_bytes() - before < 0.5 * total


def test_a_cut_copy_leaves_nothing(open_engine, monkeypatch):
    monkeypatch.setattr(resident, "_SLICE_BYTES", 1 << 20)
    before = memory_bytes()
    held = []

    def interrupted(done, total):
        held.append((memory_bytes() - before, done, total))
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        open_engine(MINI, resident=True, nodes=TWO_NODES, progress=interrupted)
    most, done, total = held[-1]
    assert most > 0.9 * done and done < 0.7 * total
    assert memory_bytes() - before < 0.2 * total
    assert caught.value is not None  # and its traceback: it must not keep the copies alive
    assert open_engine(MINI, resident=True).residency is not None


def test_too_little_memory(open_engine, monkeypatch):
    monkeypatch.setattr(resident, "free_memory_bytes", lambda: 12_345_678)
    before = memory_bytes()
    with pytest.raises(DoesNotFit) as caught:
        open_engine(MINI, resident=True, nodes=TWO_NODES)
    assert "25.6 MB" in caught.value.why and "12.3 MB" in caught.value.why
    assert memory_bytes() - before < 5e6


@pytest.mark.parametrize("number", [0, 1])
def test_too_little_memory_on_one_real_node(open_engine, monkeypatch, number):
    """Node 0 alone: the process may use its CPUs only, the machine's other nodes have room."""
    nodes = [(0, []), (1, [])][: number + 1]
    monkeypatch.setattr(resident, "free_node_bytes", lambda nodes: [10**12] * number + [7_000_000])
    with pytest.raises(DoesNotFit) as caught:
        open_engine(MINI, resident=True, nodes=nodes)
    assert f"NUMA node {number}" in caught.value.why and "7 MB" in caught.value.why
