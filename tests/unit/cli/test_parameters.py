"""Parameter counts of files and of models.toml entries."""

import copy
import math
import shutil
from pathlib import Path

import pytest
from oracles import oracle_folder

from moechat import registry
from moechat.cli import parameters
from moechat.cli.parameters import format_count, parameters_of, parameters_text
from moechat.engine.model_files import find_model_files
from moechat.registry import load_registry

MINI = Path(registry.__file__).parent / "data" / "mini"


@pytest.mark.parametrize("folder", [MINI, oracle_folder("gpt_oss_mxfp4"), oracle_folder("llama")])
def test_files_are_counted_as_they_are_bound(folder):
    files = find_model_files(folder)
    sizes = {tensor.spec.role: math.prod(tensor.spec.shape) for tensor in files.bind()}
    spec = files.spec
    counts = parameters_of("x", None, folder)
    assert counts["parameters"] == sum(sizes.values())
    if spec.moe is None:
        assert set(counts) == {"parameters"} and "active" not in parameters_text(counts)
        return
    experts = sum(size for role, size in sizes.items() if ".experts." in role)
    active = counts["parameters"] - experts
    active += experts // spec.moe.num_experts * spec.moe.num_experts_per_token
    if not spec.tied_embeddings:
        active -= (spec.vocab_size - 1) * spec.hidden_size
    assert counts["active_parameters"] == active


def test_weights_are_not_needed(tmp_path):
    shutil.copy(MINI / "config.json", tmp_path)
    assert parameters_of("x", None, tmp_path) == parameters_of("x", None, MINI)


# Total and active, in billions, as the vendors give them, but for a last digit.
@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("deepseek-v3", 671, 37),
        ("kimi-k2", 1026, 32),
        ("qwen3-30b-a3b", 30.5, 3.0),
        ("qwen3-235b-a22b", 235, 22),
        ("gpt-oss-120b", 116.8, 5.1),
        ("gpt-oss-20b", 20.9, 3.6),
        ("olmoe-1b-7b", 6.9, 1.2),
        ("mixtral-8x7b", 46.7, 12.7),
    ],
)
def test_entries_are_counted_from_their_geometry(name, total, active):
    counts = parameters_of(name, load_registry().entries[name], None)
    assert counts["parameters"] / 1e9 == pytest.approx(total, rel=0.005)
    assert counts["active_parameters"] / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-30b-a3b", "gpt-oss-20b"])
def test_the_line_through_two_small_models_meets_the_whole(name):
    from moechat.bench.synthetic.config import Shape

    entry = load_registry().entries[name]
    whole = parameters._of_shape(Shape.of_entry(name, entry))
    counts = parameters_of(name, entry, None)
    assert (whole.total, whole.active) == tuple(counts.values())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_layers", 10**9),
        ("num_layers", "many"),
        ("num_experts", -1),
        ("num_experts_per_token", 0),
        ("num_groups", 10**6),
        ("moe_intermediate_size", 0),
        ("shared_intermediate_size", None),
        ("hidden_size", 1.5),
        ("vocab_size", True),
    ],
)
def test_a_broken_entry_has_no_count(key, value):
    entry = copy.deepcopy(load_registry().entries["deepseek-v3"])
    entry["geometry"][key] = value
    assert parameters_of("x", entry, None) == {}
    del entry["geometry"][key]
    if key != "num_groups":
        assert parameters_of("x", entry, None) == {}


@pytest.mark.parametrize(
    ("count", "digits", "text"),
    [
        (0, 3, "0"),
        (999, 3, "999"),
        (999_600, 3, "1M"),
        (31_700_000, 3, "31.7M"),
        (671_026_419_200, 3, "671B"),
        (36_630_000_000, 2, "37B"),
        (1_026_000_000_000, 3, "1.03T"),
        (10**16, 3, "10000T"),
    ],
)
def test_counts_for_people(count, digits, text):
    assert format_count(count, digits) == text


def test_unknown_is_a_dash():
    assert parameters_text({}) == "-"
