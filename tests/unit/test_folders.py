from pathlib import Path

import pytest

from moechat.errors import Usage
from moechat.folders import config_folder, state_folder

FOLDERS = (config_folder, state_folder)


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for name in ("MOECHAT_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/u")
    return monkeypatch


def test_defaults_are_below_home():
    below = [str(folder().relative_to("/home/u")) for folder in FOLDERS]
    assert below == [".config/moechat", ".local/state/moechat"]


def test_xdg_variables_count_when_absolute(bare_environment):
    bare_environment.setenv("XDG_STATE_HOME", "/var/s")
    bare_environment.setenv("XDG_CONFIG_HOME", "relative")
    assert state_folder() == Path("/var/s/moechat")
    assert config_folder() == Path("/home/u/.config/moechat")


def test_moechat_home_overrides_all(bare_environment):
    bare_environment.setenv("XDG_STATE_HOME", "/var/s")
    bare_environment.setenv("MOECHAT_HOME", "~/m")
    assert [str(folder()) for folder in FOLDERS] == [
        "/home/u/m/config",
        "/home/u/m/state",
    ]


def test_without_any_home_the_error_says_what_to_set(bare_environment):
    bare_environment.setenv("HOME", "relative")
    with pytest.raises(Usage, match="Set MOECHAT_HOME"):
        config_folder()
