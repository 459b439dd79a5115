"""The mapped file of random experts: its bytes, its views, its room and that it leaves no name."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from moechat import _native
from moechat.bench import machine
from moechat.bench.kernels import expert_weights
from moechat.bench.kernels.expert_weights import map_experts
from moechat.bench.kernels.experts import ExpertShape
from moechat.bench.settings import FORMATS
from moechat.errors import DoesNotFit, Usage

SHAPE = ExpertShape("tiny", hidden=512, inner=256, experts_per_token=2)
WEIGHTS = 3 * 512 * 256
# Bytes of one expert: codes, then scales.
BYTES = {
    "bf16": WEIGHTS * 2,
    "fp8": WEIGHTS + 3 * 2 * 4 * 4,
    "mxfp4": WEIGHTS // 2 + WEIGHTS // 32,
    "int4": WEIGHTS // 2 + WEIGHTS // 32 * 2,
    "q8_0": WEIGHTS // 32 * 34,
    "q4_0": WEIGHTS // 32 * 18,
    "q5_0": WEIGHTS // 32 * 22,
    "q4_k": WEIGHTS // 256 * 144,
    "q5_k": WEIGHTS // 256 * 176,
    "q6_k": WEIGHTS // 256 * 210,
    "mxfp4_block": WEIGHTS // 32 * 17,
}


def silent(done, total):
    pass


@pytest.mark.parametrize("format_", FORMATS)
def test_every_format_is_finite_and_counts_its_bytes(format_):
    weights = map_experts(format_, SHAPE, 3, silent)
    assert weights.expert_bytes == BYTES[format_]
    assert weights.bytes.nbytes >= 3 * weights.expert_bytes
    assert not weights.bytes.flags.writeable
    for matrices in weights.experts:
        for name, view in matrices.items():
            sizes = (512, 256) if name == "down" else (256, 512)
            assert (view.outputs, view.inputs) == sizes
            rows = np.stack([_native.decode_row(view, row) for row in range(view.rows)])
            assert np.isfinite(rows).all()
            # Products of inputs of about 1 stay of about 1, so that SwiGLU is no constant.
            assert 0.2 < rows.std() * np.sqrt(view.inputs) < 30


def test_experts_differ_and_lie_where_the_views_say():
    weights = map_experts("fp8", SHAPE, 4, silent)
    first_rows = {
        _native.decode_row(expert[name], 0).tobytes()
        for expert in weights.experts
        for name in ("gate", "up")
    }
    assert len(first_rows) == 8


def test_the_file_has_no_name_while_it_is_mapped(folder):
    weights = map_experts("bf16", SHAPE, 2, silent)
    assert os.listdir(folder) == []
    assert weights.bytes[:16].any()


def test_pages_are_ordinary_ones():
    # Matrices of 8 MB: written in one piece, they get huge pages where the kernel has its way.
    weights = map_experts("bf16", ExpertShape("wide", 4096, 1024, 2), 2, silent)
    assert weights.bytes[::4096].any()
    place = weights.bytes.ctypes.data
    mappings = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    own = next(text for text in mappings if text.startswith(f"{place:x}-"))
    huge = re.search(r"FilePmdMapped: *(\d+)", own)
    assert "(deleted)" in own and (huge is None or huge[1] == "0")


def test_progress_grows_to_the_whole():
    told = []
    weights = map_experts("int4", SHAPE, 5, lambda done, total: told.append((done, total)))
    assert {total for _, total in told} == {weights.bytes.nbytes}
    done = [done for done, _ in told]
    assert done == sorted(done) and done[-1] == weights.bytes.nbytes


def test_a_full_disk_and_a_full_memory_are_told_before_anything_is_written(folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(expert_weights, "available_memory_bytes", lambda: 1_000_000)
        with pytest.raises(DoesNotFit, match=r"memory.*--experts"):
            map_experts("fp8", SHAPE, 4, silent)
    full = SimpleNamespace(f_bavail=10, f_frsize=4096)
    with monkeypatch.context() as patch:
        patch.setattr(expert_weights.os, "statvfs", lambda path: full)
        with pytest.raises(DoesNotFit, match=r"disk.*TMPDIR"):
            map_experts("fp8", SHAPE, 4, silent)
    assert os.listdir(folder) == []


def test_a_shape_of_any_size_is_refused_before_a_matrix_is_made(folder):
    with pytest.raises(DoesNotFit, match=r"13\.2 TB"):
        map_experts("fp8", ExpertShape("huge", 1 << 20, 1 << 20, 8), None, silent)


def test_a_tmpdir_that_does_not_exist_is_named(monkeypatch):
    monkeypatch.setenv("TMPDIR", "/no/such/folder")
    with pytest.raises(Usage, match="TMPDIR is /no/such/folder"):
        map_experts("fp8", SHAPE, 4, silent)


def test_a_write_that_fails_is_named_and_leaves_nothing(folder, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(expert_weights.os, "pwrite", refuse)
        with pytest.raises(DoesNotFit, match="No space left"):
            map_experts("fp8", SHAPE, 4, silent)
    assert os.listdir(folder) == []


def test_a_shape_that_a_format_cannot_hold_is_a_usage_error():
    with pytest.raises(Usage, match=r"q4_k.*groups of 256"):
        map_experts("q4_k", ExpertShape("odd", 384, 256, 2), 2, silent)


def test_memory_is_what_the_group_still_allows(tmp_path, monkeypatch):
    """A version 2 group of 1000 bytes with 700 used, 300 of them cached files: 600 are free."""
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    for group, limit in ((inner, "max"), (inner.parent, "1000")):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text("700\n")
        (group / "memory.stat").write_text("anon 400\nfile 300\n")
    listing = tmp_path / "cgroup"
    listing.write_text("0::/outer/inner\n")
    paths = {"/proc/self/cgroup": listing, "/sys/fs/cgroup": tmp_path}
    monkeypatch.setattr(machine, "Path", lambda path: paths.get(path) or type(tmp_path)(path))
    assert machine.available_memory_bytes() == 600
