import pytest


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    """The cache folder, in a home of its own."""
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(autouse=True)
def short_bursts(monkeypatch):
    """Figures are not looked at here, so they may be poor."""
    monkeypatch.setattr("moechat.bench.model_measure._DECODE_SECONDS", 0.01)
    monkeypatch.setattr("moechat.bench.model_reading._BURST_SECONDS", 0.01)
