"""The remade oracle weights are those with which the expected outputs were computed."""

from __future__ import annotations

import json

import numpy as np
import pytest
from oracle_formats import from_bf16, from_e4m3, to_bf16, to_e4m3
from oracle_weights import INDEX_NAME, digest, remake_tensors
from oracles import ORACLE_NAMES, ORACLES, oracle_folder
from safetensors import safe_open

from moechat.weights.mapped import Checkpoint


def test_all_folders_are_there():
    assert len(ORACLE_NAMES) == 20


@pytest.mark.parametrize("name", ORACLE_NAMES)
def test_every_tensor_has_the_bytes_of_the_manifest(name):
    """Fails when a numpy release draws or rounds differently: expected.npz then means nothing."""
    manifest = json.loads((ORACLES / name / "manifest.json").read_text())
    files = remake_tensors(json.loads((ORACLES / name / "config.json").read_text()), manifest)
    remade = {
        file: {key: [t.dtype, list(t.array.shape), digest(t)] for key, t in tensors.items()}
        for file, tensors in files.items()
    }
    assert remade == manifest["files"]


@pytest.mark.parametrize("name", ["deepseek_v3_fp8_odd", "gpt_oss_mxfp4", "gemma2"])
def test_the_folder_holds_what_was_made(name):
    """As the safetensors library reads it: it shares no code with the writer."""
    folder = oracle_folder(name)
    manifest = json.loads((ORACLES / name / "manifest.json").read_text())
    held = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "np") as opened:
            held[file.name] = {
                key: [opened.get_slice(key).get_dtype(), opened.get_slice(key).get_shape()]
                for key in opened.keys()  # noqa: SIM118 - not a dict
            }
    assert held == {
        file: {key: entry[:2] for key, entry in tensors.items()}
        for file, tensors in manifest["files"].items()
    }
    files = remake_tensors(json.loads((folder / "config.json").read_text()), manifest)
    stored = Checkpoint.open(folder).tensors
    for tensors in files.values():
        for key, tensor in tensors.items():
            assert stored[key].array.tobytes() == tensor.array.tobytes()
    assert (folder / INDEX_NAME).exists() == (len(files) > 1)
    assert (folder / "expected.npz").exists() and (folder / "meta.json").exists()


def test_bf16_rounds_to_nearest_even():
    exact = from_bf16(np.arange(0x7F80, dtype=np.uint16))
    assert (to_bf16(exact) == np.arange(0x7F80)).all()
    halfway = (exact[1:-1].astype(np.float64) + exact[2:]) / 2
    codes = np.arange(1, 0x7F7F)
    assert (to_bf16(halfway.astype(np.float32)) == codes + codes % 2).all()
    above = np.nextafter(halfway.astype(np.float32), np.float32(np.inf))
    assert (to_bf16(above) == codes + 1).all()
    assert (to_bf16(-above) == codes + 1 + 0x8000).all()


def test_e4m3_rounds_to_nearest_even():
    codes = np.arange(0x7F)  # 0x7F is NaN
    exact = from_e4m3(codes)
    assert exact[1] == 2.0**-9 and exact[0x38] == 1 and exact[0x7E] == 448
    assert (np.diff(exact) > 0).all()
    assert (to_e4m3(exact) == codes).all() and (to_e4m3(-exact) == codes + 128).all()
    halfway = (exact[:-1] + exact[1:]) / 2  # exact in float32
    assert (to_e4m3(halfway) == codes[:-1] + codes[:-1] % 2).all()
    assert (to_e4m3(np.nextafter(halfway, np.float32(0))) == codes[:-1]).all()
    assert (to_e4m3(np.nextafter(halfway, np.float32(500))) == codes[1:]).all()
