"""``bench kernels`` in this process: the contract's keys, the guard, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from moechat import _native
from moechat.bench import settings
from moechat.bench.kernels import expert_layer, expert_weights, experts, measure
from moechat.bench.kernels.expert_layer import KernelMismatch
from moechat.bench.kernels.measure import measure_kernels
from moechat.bench.settings import KernelSettings
from moechat.errors import ModelNotFound, Usage

CONTRACT = {
    "op", "format", "isa", "threads", "batch", "ms_median", "weight_gb_per_s", "read_gb_per_s",
    "fraction_of_read",
}  # fmt: skip
MINI_FP8_EXPERT_BYTES = 3 * 384 * 128 + 3 * 3 * 4


def quick(**changes):
    """Settings of a run that takes a fraction of a second."""
    usual = {
        "formats": ("fp8",),
        "shape": "mini",
        "threads": (1,),
        "experts": 32,
        "bursts": 5,
        "burst_seconds": 0.005,
    }
    return KernelSettings(**(usual | changes))


def measured(**changes):
    return measure_kernels(quick(**changes), lambda line: None)


def test_the_report_is_the_contract():
    report = json.loads(
        json.dumps(measured(formats=("fp8", "bf16"), threads=(1, 2), batches=(1, 3)))
    )
    assert {"machine", "versions", "rows"} <= set(report)
    wanted = [(f, t, b) for f in ("fp8", "bf16") for t in (1, 2) for b in (1, 3)]
    assert [(r["format"], r["threads"], r["batch"]) for r in report["rows"]] == wanted
    for row in report["rows"]:
        assert set(row) >= CONTRACT
        assert (row["op"], row["isa"]) == ("moe_ffn", _native.active_instruction_set())
        assert len(row["bursts"]) == 5
        assert row["ms_min"] <= row["ms_median"] <= row["ms_max"]
        assert 0 < row["fraction_of_read_min"] <= row["fraction_of_read"]
        assert row["regime"] in ("fast", "slow", "mixed")
        assert row["max_relative_error"] < 1e-2
        assert {"experts.gate_up", "experts.down"} <= {phase["phase"] for phase in row["phases"]}
        medians = sorted(burst["ms_per_call"] for burst in row["bursts"])
        assert row["ms_median"] == pytest.approx(medians[2], rel=1e-3)
        for burst in row["bursts"]:
            reads = burst["read_before_gb_per_s"] + burst["read_after_gb_per_s"]
            assert burst["fraction_of_read"] == pytest.approx(
                2 * burst["weight_gb_per_s"] / reads, rel=2e-3
            )
            assert burst["weight_gb_per_s"] == pytest.approx(
                row["weight_bytes_per_call"] / burst["ms_per_call"] / 1e6, rel=2e-3
            )


def test_bytes_are_those_of_the_distinct_experts():
    same, uniform = measured(batches=(6,)), measured(batches=(6,), experts_hit="uniform")
    assert same["weights"][0]["expert_bytes"] == MINI_FP8_EXPERT_BYTES
    assert same["rows"][0]["weight_bytes_per_call"] == 4 * MINI_FP8_EXPERT_BYTES
    # 32 (1 - (1 - 4/32)^6) = 17.6 of 32 experts are expected.
    distinct = uniform["rows"][0]["weight_bytes_per_call"] / MINI_FP8_EXPERT_BYTES
    assert abs(distinct - 17.6) < 1.5


@pytest.mark.parametrize("isa", _native.supported_instruction_sets())
def test_the_forced_instruction_set_runs_and_the_old_one_comes_back(isa):
    before = _native.active_instruction_set()
    report = measured(isa=isa)
    assert report["rows"][0]["isa"] == isa
    assert _native.active_instruction_set() == before


def test_a_wrong_kernel_is_no_figure(monkeypatch):
    right = expert_layer.ExpertCalls.run

    def wrong(self, x, ids, weights, out):
        right(self, x, ids, weights, out)
        out *= 1 if _native.active_instruction_set() == "ref" else 1 + self.error

    monkeypatch.setattr(expert_layer.ExpertCalls, "run", wrong)
    isa = _native.supported_instruction_sets()[0]
    for error in (0.02, np.nan):
        monkeypatch.setattr(expert_layer.ExpertCalls, "error", error, raising=False)
        with pytest.raises(KernelMismatch, match=isa):
            measured(isa=isa)
    monkeypatch.setattr(expert_layer.ExpertCalls, "error", 0.005)
    assert measured(isa=isa)["weights"][0]["max_relative_error"] == pytest.approx(0.005, rel=0.01)


def test_without_a_number_the_experts_outgrow_the_caches(monkeypatch):
    for module in (measure, expert_weights):
        monkeypatch.setattr(module, "last_level_cache_bytes", lambda: 20_000_000)
    weights = measured(experts=None)["weights"][0]
    assert weights["file_over_last_level_cache"] >= 2 and weights["experts"] % 4 == 0
    for module in (measure, expert_weights):
        monkeypatch.setattr(module, "last_level_cache_bytes", lambda: None)
    weights = measured(experts=None)["weights"][0]
    assert (weights["experts"], weights["file_over_last_level_cache"]) == (64, None)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"shape": "minu"}, ModelNotFound, "did you mean mini"),
        ({"experts": 3}, Usage, "uses 4 at once"),
        ({"formats": ("q6_k",)}, Usage, "groups of 256"),
        ({"isa": "neon"}, Usage, "neon.*avx512bf16"),
    ],
)
def test_what_cannot_be_measured_is_named(changes, error, words):
    before = _native.active_instruction_set()
    with pytest.raises(error, match=words):
        measured(**changes)
    assert _native.active_instruction_set() == before


@pytest.mark.parametrize(
    ("geometry", "words"),
    [
        ({"hidden_size": 64}, "no experts"),
        ({"hidden_size": 64, "num_experts": 0}, "no experts.*dense"),
        ({"num_experts": 8, "hidden_size": "x"}, "hidden_size"),
        (None, "no geometry"),
    ],
)
def test_a_model_without_experts_is_named(geometry, words, monkeypatch):
    entries = {"dense": {"geometry": geometry}, "mini": {"geometry": {"num_experts": 32}}}
    monkeypatch.setattr(settings, "load_registry", lambda: type("R", (), {"entries": entries}))
    with pytest.raises(Usage, match=words):
        experts.expert_shape("dense")


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ({"format": "fp9"}, "fp9.*fp8"),
        ({"format": ""}, "--format"),
        ({"threads": ""}, "--threads"),
        ({"threads": "0"}, "1 to 256"),
        ({"threads": "1,x"}, "'x'"),
        ({"threads": "1,,2"}, "beside a comma"),
        ({"batch": "-1"}, "'-1'"),
        ({"batch": "99999"}, "1 to 4096"),
        ({"bursts": "4"}, "5 to 1000"),
        ({"experts": "1e3"}, "1e3"),
        ({"experts-hit": "some"}, "same, uniform"),
        ({"bursts": "9" * 5000}, "--bursts"),
    ],
)
def test_texts_that_make_no_sense_are_usage_errors(texts, words):
    with pytest.raises(Usage, match=words):
        KernelSettings.from_texts(texts)


def test_texts_become_settings():
    read = KernelSettings.from_texts({})
    assert read.formats == ("fp8", "int4", "mxfp4", "bf16")
    assert read.threads == (_native.available_cpus(),)
    assert (read.shape, read.batches, read.bursts) == ("deepseek-v3", (1,), 7)
    read = KernelSettings.from_texts({"threads": "1, 2,2", "batch": "8", "experts": "64"})
    assert (read.threads, read.batches, read.experts) == ((1, 2), (8,), 64)
