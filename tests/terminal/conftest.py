from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from screen import ChatScreen


@pytest.fixture
def open_chat(tmp_path: Path) -> Iterator[Callable[..., ChatScreen]]:
    """Opens chats with the scripted conversation; MOECHAT_HOME is ``tmp_path``."""
    opened: list[ChatScreen] = []

    def open_one(**options: Any) -> ChatScreen:
        opened.append(ChatScreen(tmp_path, **options))
        return opened[-1]

    yield open_one
    for chat in opened:
        chat.close()
