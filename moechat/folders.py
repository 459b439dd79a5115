"""Where moechat keeps its own files: XDG folders, or one home that MOECHAT_HOME names."""

from __future__ import annotations

import os
from pathlib import Path

from moechat.errors import Usage


def config_folder() -> Path:
    """Settings and the user's models.toml. Not created here; raises Usage without any home."""
    return _folder("XDG_CONFIG_HOME", ".config", "config")


def state_folder() -> Path:
    """History and sessions. Not created here; raises Usage without any home."""
    return _folder("XDG_STATE_HOME", ".local/state", "state")


def cache_folder() -> Path:
    """What can be made again. Not created here; raises Usage without any home."""
    return _folder("XDG_CACHE_HOME", ".cache", "cache")


def _folder(variable: str, below_home: str, own_name: str) -> Path:
    own_home = os.environ.get("MOECHAT_HOME")
    if own_home:
        return Path(os.path.abspath(os.path.expanduser(own_home))) / own_name
    base = os.environ.get(variable, "")
    if not os.path.isabs(base):  # the XDG specification: relative values are to be ignored
        home = os.path.expanduser("~")
        if not os.path.isabs(home):
            raise Usage("no home folder is known", "HOME is not set", "Set MOECHAT_HOME")
        base = os.path.join(home, below_home)
    return Path(base) / "moechat"
