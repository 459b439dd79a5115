"""Models of every family, converted to GGUF, are read as they are from Hugging Face layout."""

import dataclasses
import json

import gguf_convert
import numpy as np
import pytest
from oracles import ORACLE_NAMES, ORACLES, oracle_folder

from moechat.models import architectures
from moechat.models.gguf.bind import bind_tensors
from moechat.models.gguf.config import read_spec
from moechat.weights.gguf_file import GGUFCheckpoint
from moechat.weights.mapped import Checkpoint

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def read_config(folder):
    return json.loads((folder / "config.json").read_text())


def is_convertible(name):
    """Of quantised weights only MXFP4 is the same in both layouts."""
    config = read_config(ORACLES / name)
    return config.get("quantization_config", {}).get("quant_method", "mxfp4") == "mxfp4"


@pytest.fixture(params=filter(is_convertible, ORACLE_NAMES))
def folder(request):
    return oracle_folder(request.param)


@pytest.fixture
def config(folder):
    return read_config(folder)


@pytest.fixture
def checkpoint(folder, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_convert.convert_folder(folder, "BF16"))
    return GGUFCheckpoint.open([path])


def test_the_spec_is_the_same(folder, config, checkpoint):
    read, expected = read_spec(checkpoint), architectures.load_spec(folder)
    is_llama = checkpoint.metadata["general.architecture"] == "llama"
    assert len(read.ropes) == len(expected.ropes)
    for rope, other in zip(read.ropes, expected.ropes):
        # The file holds float32, and rows of q and k in another order.
        assert rope.inverse_frequencies == pytest.approx(other.inverse_frequencies, rel=1e-6)
        assert rope.amplitude == pytest.approx(other.amplitude, rel=1e-6)
        assert rope.interleaved == (other.interleaved or is_llama)
    assert set(read.end_ids) <= set(expected.end_ids)  # generation_config.json may name more
    skipped = {"architecture", "ropes", "end_ids"}
    for field in dataclasses.fields(read):
        if field.name not in skipped:
            value, other = getattr(read, field.name), getattr(expected, field.name)
            is_float = isinstance(other, float)
            assert value == (pytest.approx(other, rel=1e-6) if is_float else other), field.name


def test_every_weight_is_the_same(folder, config, checkpoint):
    spec = architectures.load_spec(folder)
    expected = by_role(architectures.bind_tensors(spec, Checkpoint.open(folder), config))
    found = by_role(bind_tensors(read_spec(checkpoint), checkpoint))
    if checkpoint.metadata["general.architecture"] == "llama":
        for role in found:
            if role.endswith((".q", ".k")):
                heads = len(found[role]) // spec.attention.head_dim
                pairs = found[role].reshape(heads, -1, 2, spec.hidden_size)
                found[role] = pairs.swapaxes(1, 2).reshape(found[role].shape)
    for role in [role for role in expected if role.endswith(".kv_b")]:
        stem = role.removesuffix("kv_b")
        halves = [
            found.pop(f"{stem}{half}_b.{head}")
            for head in range(spec.num_heads)
            for half in ("k", "v")
        ]
        found[role] = np.concatenate(halves)
    assert found.keys() == expected.keys()
    for role, values in expected.items():
        assert found[role].shape == values.shape, role
        assert (found[role] == values).all(), role


def by_role(bound_tensors):
    """float32 vectors, and matrices [outputs, inputs], one a role."""
    values = {}
    for bound in bound_tensors:
        entry, array = bound.spec, decoded(bound)
        array = array.swapaxes(-1, -2) if bound.transposed else array
        array = array + np.float32(entry.added)
        parts = {entry.role: array}
        if entry.stacked:
            parts = {entry.role.replace("*", str(i)): part for i, part in enumerate(array)}
        for role, part in parts.items():
            if entry.interleaved:
                stem, suffix = role.rsplit("gate_up", 1)
                values |= {f"{stem}gate{suffix}": part[::2], f"{stem}up{suffix}": part[1::2]}
            else:
                values[role] = part
    return values


def decoded(bound):
    array = bound.data.array
    if bound.format == "bf16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    if bound.format == "mxfp4":  # [..., blocks, 16]: values 2 i and 2 i + 1 in byte i
        codes = np.stack([array & 15, array >> 4], axis=-1).reshape(*array.shape[:-1], 32)
        return scaled(codes, bound.scale.array)
    if bound.format == "mxfp4_block":  # [..., blocks x 17]: a scale; values i, i + 16 in byte i
        blocks = array.reshape(*array.shape[:-1], -1, 17)
        codes = np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], axis=-1)
        return scaled(codes, blocks[..., 0])
    assert bound.format == "f32"
    return array


def scaled(codes, scales):
    values = np.ldexp(E2M1[codes], scales[..., None].astype(np.int32) - 127)
    return values.reshape(*values.shape[:-2], -1)
