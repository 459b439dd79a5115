"""Synthetic checkpoints of every family: opened by the engine, finite, removed or kept."""

from __future__ import annotations

import os

import numpy as np
import pytest
from tiny_shapes import CHANGES, tiny

from moechat.bench.model.weight_bytes import of_files
from moechat.bench.synthetic.folder import make_room, synthetic_model, synthetic_root
from moechat.bench.synthetic.tensors import Recipe, stored_parts, total_bytes
from moechat.engine.engine import Engine
from moechat.errors import ArchitectureUnsupported, DoesNotFit, Usage

CASES = [(name, None) for name in CHANGES] + [
    ("deepseek-v3", "int4"),
    ("deepseek-v3", "bf16"),
    ("qwen3-30b-a3b", "fp8"),
    ("glm-4.6", "int4"),
    ("mixtral-8x7b", "fp8"),
    ("gpt-oss-20b", "bf16"),
    ("gpt-oss-20b", "mxfp4"),
]


def build(name, format_=None):
    whole = tiny(name)
    shape = whole.cut(dense_layers=2 if whole.dense_layers else 0, moe_layers=2)
    return synthetic_model(shape, Recipe.of(whole, format_), lambda done, of: None)


def folders():
    return [path for path in synthetic_root().iterdir() if path.is_dir()]


@pytest.mark.parametrize(("name", "format_"), CASES)
def test_every_family_opens_and_gives_sane_logits(name, format_):
    with build(name, format_) as model:
        with Engine.open(model.path, threads=2) as engine:
            ids = np.random.default_rng(1).integers(0, 512, 40).tolist()
            logits = engine.session().extend(ids)
        assert np.isfinite(logits).all()
        # Weights have the size that keeps activations and logits near one.
        assert 0.3 < logits.std() < 3
        # What each token says differs from what the others say.
        assert len(set(logits.argmax(axis=1).tolist())) > 20


def test_formats_are_the_models_own_and_the_wanted_ones():
    def formats(name, format_):
        with build(name, format_) as model, Engine.open(model.path, threads=1) as engine:
            bound = engine.model.files.bind()
            roles = {"head": "head", "layers.2.q_a": "linear", "layers.2.experts.1.up": "experts"}
            roles |= {"layers.1.experts.*.down": "experts", "layers.1.q": "linear"}
            return {
                roles[tensor.spec.role]: tensor.format
                for tensor in bound
                if tensor.spec.role in roles
            }

    v3 = {"head": "bf16", "linear": "fp8", "experts": "fp8"}
    assert formats("deepseek-v3", None) == v3
    assert formats("deepseek-v3", "int4") == v3 | {"linear": "int4", "experts": "int4"}
    kimi = {"head": "bf16", "linear": "bf16", "experts": "int4"}
    assert formats("kimi-k2-thinking", None) == kimi
    oss = {"head": "bf16", "linear": "bf16", "experts": "mxfp4"}
    assert formats("gpt-oss-20b", None) == oss == formats("gpt-oss-20b", "mxfp4")


@pytest.mark.parametrize(
    ("name", "format_"),
    [("deepseek-v3", "mxfp4"), ("gpt-oss-20b", "fp8"), ("gpt-oss-20b", "int4")],
)
def test_formats_that_no_checkpoint_has_are_refused(name, format_):
    with pytest.raises(Usage) as caught:
        Recipe.of(tiny(name), format_)
    assert name in caught.value.message and format_ in caught.value.message


def test_stored_bytes_are_what_the_plan_says():
    with build("deepseek-v3") as model:
        parts = stored_parts(model.shape, model.recipe)
        files = list(model.path.glob("*.safetensors"))
        headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in files)
        assert sum(path.stat().st_size for path in files) == total_bytes(parts) + headers
        # 4 of 32 experts in 2 layers, 3 matrices of 64 x 128: FP8, one block of each, one scale.
        assert of_files(model.path).routed == 2 * 4 * 3 * (64 * 128 + 4)


def test_parts_of_a_model_share_its_files_and_open():
    with build("deepseek-v3") as model:
        shape = model.shape
        small = model.part(shape.cut(dense_layers=1, moe_layers=0, vocab=64))
        assert (small / "layer-0000.safetensors").is_symlink()
        assert not (small / "layer-0001.safetensors").exists()
        with Engine.open(small, threads=1) as engine:
            assert (engine.spec.num_layers, engine.spec.vocab_size) == (1, 64)
            few = engine.session().extend([1, 2, 3])
        with Engine.open(model.part(shape), threads=1) as engine:
            assert engine.spec.num_layers == 4
            assert np.isfinite(engine.session().extend([1, 2, 3])).all()
        assert few.shape == (3, 64)


def test_experts_differ_from_each_other():
    with build("deepseek-v3") as model, Engine.open(model.path, threads=1) as engine:
        experts = [
            tensor.data.array.tobytes()
            for tensor in engine.model.files.bind()
            if tensor.spec.role.startswith("layers.2.experts.")
        ]
        assert len(experts) == 96 == len(set(experts))


def test_it_is_removed_at_the_end_also_after_an_error():
    with build("olmoe-1b-7b") as model:
        assert model.path.name.startswith("olmoe-1b-7b-bf16-")
        assert folders() == [model.path]
    assert folders() == []
    with pytest.raises(KeyboardInterrupt), build("olmoe-1b-7b"):
        raise KeyboardInterrupt
    assert folders() == []


def test_an_interrupted_build_leaves_nothing():
    shape = tiny("olmoe-1b-7b")

    def interrupt(done, of):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), synthetic_model(shape, Recipe.of(shape), interrupt):
        pass
    assert folders() == []


def test_a_full_disk_is_an_error_with_numbers_and_leaves_nothing(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("moechat.bench.synthetic.folder.write_safetensors", full)
    with pytest.raises(DoesNotFit) as caught, build("olmoe-1b-7b"):
        pass
    assert "0 B of " in caught.value.message
    assert folders() == []


def test_what_a_killed_run_left_is_removed_and_what_a_living_one_uses_is_not():
    root = synthetic_root()
    (root / "left").mkdir(parents=True)
    (root / "left" / ".lock").touch()
    with build("olmoe-1b-7b") as model:
        assert make_room() > 0
        assert folders() == [model.path]
    assert folders() == []


def test_odd_entries_do_not_block_a_run():
    root = synthetic_root()
    (root / ".lock").mkdir(parents=True)
    (root / "odd" / ".lock").mkdir(parents=True)
    (root / "left").mkdir()
    assert make_room() > 0
    assert not (root / "left").exists()
    with build("olmoe-1b-7b") as model:
        assert model.path.exists()
    assert not model.path.exists()


def test_nothing_outside_is_removed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    synthetic_root().mkdir(parents=True)
    os.symlink(outside, synthetic_root() / "link")
    make_room()
    assert outside.is_dir()


def test_a_routing_that_cannot_be_is_refused():
    shape = tiny("deepseek-v3").cut(experts=6)  # not in 4 groups
    with pytest.raises(ArchitectureUnsupported):
        stored_parts(shape, Recipe.of(shape))


def test_a_cache_folder_that_cannot_be_made_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path / "file"))
    with pytest.raises(Usage, match=r"file/cache/synthetic cannot be made.*MOECHAT_HOME"):
        make_room()
