"""Fingerprints of model files."""

from __future__ import annotations

import pytest

from moechat.errors import CheckpointDamaged
from moechat.weights.fingerprint import files_fingerprint


@pytest.fixture
def files(tmp_path):
    weights, config = tmp_path / "model.safetensors", tmp_path / "tail.json"
    weights.write_bytes(bytes(1_000_000))
    config.write_bytes(b"{}")
    return [weights, config]


@pytest.mark.parametrize("sample", range(32))
def test_content_is_sampled_from_end_to_end(files, sample):
    """32 samples of each of two files, evenly apart."""
    before = files_fingerprint(files)
    content = bytearray(files[0].read_bytes())
    content[(1_000_000 - 4096) * sample // 31 + 4095] = 1
    files[0].write_bytes(content)
    assert files_fingerprint(files) != before


def test_sizes_count_but_neither_folder_nor_order(files, tmp_path):
    before = files_fingerprint(files)
    assert files_fingerprint(files[::-1]) == before
    (tmp_path / "moved").mkdir()
    moved = [file.rename(tmp_path / "moved" / file.name) for file in files]
    assert files_fingerprint(moved) == before
    moved[1].write_bytes(b"{} ")
    assert files_fingerprint(moved) != before
    assert files_fingerprint(moved[:1]) != files_fingerprint(moved)
    moved[1].unlink()
    with pytest.raises(CheckpointDamaged):
        files_fingerprint(moved)
