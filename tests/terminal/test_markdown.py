"""What a terminal shows of Markdown that comes token by token."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import Terminal, shown

from moechat.terminal import markdown
from moechat.terminal.markdown import MarkdownPrinter


@pytest.fixture(autouse=True)
def draw_always(monkeypatch):
    monkeypatch.setattr(markdown, "_MIN_SECONDS_BETWEEN_DRAWS", 0.0)
    monkeypatch.setattr(markdown, "_IDLE_PER_DRAW", 0)


@pytest.fixture(autouse=True)
def size(monkeypatch):
    def set_size(columns: int, rows: int) -> None:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("LINES", str(rows))

    set_size(80, 24)
    return set_size


def stream(text: str, piece: int = 1) -> str:
    out = Terminal()
    printer = MarkdownPrinter(out)
    for at in range(0, len(text), piece):
        printer.write(text[at : at + piece])
    printer.finish()
    return out.getvalue()


DOCUMENT = """# Title

Some **bold** text
and `code`, then

1. one

   still one
2. two

```python
x = a[0]

# [red] **raw**
```
| a | b |
|---|---|
| 1 | 2 |

End.
"""


def test_blocks_are_shown_once_and_in_order():
    text = shown(stream(DOCUMENT))
    squeezed = [" ".join(line.split()) for line in text.split("\n") if line.strip(" ─━")]
    assert squeezed == [
        "Title",
        "Some bold text",
        "and code, then",
        "1 one",
        "still one",
        "2 two",
        "x = a[0]",
        "# [red] **raw**",
        "a b",
        "1 2",
        "End.",
    ]


def test_blank_lines_stay_where_they_are():
    text = "\n\none\ntwo\n\nthree\n- four\n\n\n```\nx\n\ny\n```\nfive\n\n"
    assert shown(stream(text)) == "one\ntwo\n\nthree\n\n • four\n\nx\n\ny\nfive"


@pytest.mark.parametrize("piece", [2, 7, 1000])
def test_pieces_do_not_matter(piece):
    assert shown(stream(DOCUMENT, piece)) == shown(stream(DOCUMENT))


@pytest.mark.parametrize(
    "text",
    [
        "a[i] [bold] list[int] [/INST] [link=x]y[/link] :smile:",
        "<div>html</div> <b>x</b> <!-- c --> &lt; &#42;",
        "<think>",
        "[a]: http://example.org",
        "\\[ x^2 \\] and \\(y\\)",
        "`a[i] [/INST]`",
        "漢字かな混じり文 👍 ﾊﾝｶｸ",
    ],
)
def test_what_is_no_markdown_stays_as_it_is(text):
    visible = shown(stream(text))
    # pyte leaves an empty cell after a wide character
    assert visible.replace(" ", "") == text.strip("`").replace(" ", "")


def test_control_characters_are_neutralised():
    output = stream("\x1b[31mred\x9b2J\u202e")
    assert "␛[31mred�2J�" in shown(output)
    assert "\x1b[31mred" not in output and "\x9b" not in output


@pytest.mark.parametrize(
    "text",
    [
        " ".join(f"w{number}" for number in range(350)),
        "\n".join(f"w{number}" for number in range(100)),
        "\n".join(f"- w{number}" for number in range(100)),
        "```\n" + "\n".join(f"w{number}" for number in range(100)),
        "```\n" + " ".join(f"w{number}" for number in range(350)) + "\n```",
        "| a |\n|---|\n" + "\n".join(f"| w{number} |" for number in range(60)),
    ],
    ids=["paragraph", "lines", "list", "code", "long code line", "table"],
)
@pytest.mark.parametrize("rows", [2, 5, 24])
def test_nothing_is_lost_when_a_block_is_higher_than_the_screen(text, rows, size):
    size(40, rows)
    visible = shown(stream(text, 9), 40, rows)
    assert re.findall(r"w\d+", visible) == re.findall(r"w\d+", text)


def test_a_line_without_blanks_is_not_lost(size):
    size(20, 5)
    text = "x" * 3000
    assert shown(stream(text, 50), 20, 5).count("x") == 3000


def test_cost_is_linear_in_length():
    def written_per_character(length: int) -> float:
        text = ("word " * 20 + "\n") * (length // 101)
        return len(stream(text, 60)) / len(text)

    short, long = written_per_character(6_000), written_per_character(18_000)
    assert long < 1.2 * short


def test_a_screen_that_changes_its_size_loses_nothing(size):
    out = Terminal()
    printer = MarkdownPrinter(out)
    sizes = [(80, 24), (40, 24), (79, 10), (30, 24)]
    for number in range(200):
        size(*sizes[number // 50])
        printer.write(f"w{number} ")
    printer.finish()
    assert re.findall(r"w\d+", shown(out.getvalue())) == [f"w{n}" for n in range(200)]


def test_rows_end_without_blanks():
    assert not re.search(r" (\x1b\[[0-9;]*m)*\n", stream("some **text**\n\n> quoted\n\n- one"))


PIECES = ["w ", "\n", "\n\n", "```\n", "- ", "  - ", "1. ", "> ", "| a | b |\n|--|--|\n", "|", "**"]
PIECES += [
    "*",
    "_",
    "`",
    "# ",
    "    ",
    "[",
    "](",
    "<b>",
    "&amp;",
    "\\",
    "---\n",
    "漢",
    "👍",
    "\t",
    "~~",
]


@given(st.lists(st.sampled_from(PIECES), max_size=25).map("".join))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_text_is_shown_whole_however_it_comes(text):
    visible = shown(stream(text, len(text) + 1))
    assert shown(stream(text, 3)) == visible
    for letter in "w漢👍":
        assert visible.count(letter) == text.count(letter)
