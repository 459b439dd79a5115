"""Temporary files of measurements go to the test's own folder."""

from __future__ import annotations

import tempfile

import pytest


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where the weights are written."""
    place = tmp_path / "weights"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return place
