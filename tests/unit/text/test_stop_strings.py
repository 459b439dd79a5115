from __future__ import annotations

import pytest

from moechat.errors import BadParameter
from moechat.text.stop_strings import StopStrings


def _run(stops: tuple[str, ...], pushes: list[str]) -> tuple[str, bool]:
    watcher, shown = StopStrings(stops), ""
    for text in pushes:
        more, stopped = watcher.push(text)
        shown += more
        if stopped:
            return shown, True
    return shown + watcher.flush(), False


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("stops", "text", "shown", "stopped"),
    [
        ((), "anything", "anything", False),
        (("END",), "one END two", "one ", True),
        (("END",), "one EN", "one EN", False),
        (("aab",), "aaaab", "aa", True),
        (("\n\n", "User:"), "a\nb\n\nUser:", "a\nb", True),
        (("abcx", "bc"), "abcd", "a", True),
        (("é👍",), "café👍!", "caf", True),
    ],
)
def test_same_text_however_it_is_cut(
    stops: tuple[str, ...], text: str, shown: str, stopped: bool, size: int
) -> None:
    pushes = [text[at : at + size] for at in range(0, len(text), size)]
    assert _run(stops, pushes) == (shown, stopped)


def test_no_half_of_a_stop_string_is_shown_early() -> None:
    watcher = StopStrings(("STOP",))
    assert watcher.push("a ST") == ("a ", False)
    assert watcher.push("x") == ("STx", False)
    assert watcher.push("STOP and more") == ("", True)
    assert watcher.push("more") == ("", True)
    assert watcher.flush() == ""


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(BadParameter):
        StopStrings(("",))
