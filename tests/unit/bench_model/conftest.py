import pytest


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    """The cache folder, in a home of its own."""
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"
