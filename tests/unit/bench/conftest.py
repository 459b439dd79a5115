"""Everything that measurements write goes to the test's own folders; bursts are short."""

from __future__ import annotations

import tempfile

import pytest


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where the weights of kernels are written."""
    place = tmp_path / "weights"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return place


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    """The cache folder, in a home of its own."""
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(autouse=True)
def short_bursts(monkeypatch):
    """Figures are not looked at here, so they may be poor."""
    monkeypatch.setattr("moechat.bench.model.probes._DECODE_SECONDS", 0.01)
    monkeypatch.setattr("moechat.bench.model.measure._READ_SECONDS", 0.01)
