from __future__ import annotations

import random

import pytest

from moechat.errors import BadParameter
from moechat.text.stop_strings import StopStrings


def run(stops: tuple[str, ...], pushes: list[str]) -> tuple[str, bool]:
    """All text that was shown, and whether a stop string ended it."""
    strings, shown = StopStrings(stops), ""
    for push in pushes:
        text, stopped = strings.push(push)
        shown += text
        if stopped:
            return shown, True
    return shown + strings.flush(), False


def expected(stops: tuple[str, ...], text: str) -> tuple[str, bool]:
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@pytest.mark.parametrize(
    ("stops", "pushes", "shown"),
    [
        (("END",), ["a E", "N", "D b"], ("a ", True)),
        (("END",), ["a E", "N", "d"], ("a ENd", False)),
        (("END",), ["a EN"], ("a EN", False)),
        (("aab",), ["aaa", "aab!"], ("aaa", True)),
        (("abcd", "bc"), ["ab", "cd"], ("a", True)),
        (("bc", "abc"), ["abc"], ("", True)),
        (("\n\n",), ["one\n", "two\n", "\nthree"], ("one\ntwo", True)),
        ((), ["all ", "of it"], ("all of it", False)),
    ],
)
def test_cases(stops: tuple[str, ...], pushes: list[str], shown: tuple[str, bool]) -> None:
    assert run(stops, pushes) == shown


def test_text_that_cannot_begin_a_stop_is_shown_at_once() -> None:
    strings = StopStrings(("###", "\nUser:"))
    assert strings.push("one #") == ("one ", False)
    assert strings.push("2") == ("#2", False)
    assert strings.push("\nUs") == ("", False)
    assert strings.push("e") == ("", False)
    assert strings.push("s") == ("\nUses", False)


def test_nothing_follows_a_stop() -> None:
    strings = StopStrings(("x",))
    assert strings.push("axb") == ("a", True)
    assert strings.push("more") == ("", True)
    assert strings.flush() == ""


def test_any_text_in_any_pieces() -> None:
    draw = random.Random(1)
    for _ in range(3000):
        stops = tuple(
            "".join(draw.choices("ab\n", k=draw.randint(1, 4))) for _ in range(draw.randint(1, 3))
        )
        text = "".join(draw.choices("ab\nc", k=draw.randint(0, 14)))
        cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randint(0, 5)))
        pushes = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert run(stops, pushes) == expected(stops, text), (stops, pushes)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(BadParameter):
        StopStrings(("a", ""))
