"""What a terminal shows of Markdown that comes token by token."""

from __future__ import annotations

import re

import pytest
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


def stream(text: str, piece: int = 1) -> tuple[str, MarkdownPrinter]:
    out = Terminal()
    printer = MarkdownPrinter(out)
    for at in range(0, len(text), piece):
        printer.write(text[at : at + piece])
    printer.finish()
    return out.getvalue(), printer


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
    text = shown(stream(DOCUMENT)[0])
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


@pytest.mark.parametrize("piece", [2, 7, 1000])
def test_pieces_do_not_matter(piece):
    assert shown(stream(DOCUMENT, piece)[0]) == shown(stream(DOCUMENT)[0])


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
    visible = shown(stream(text)[0])
    # pyte leaves an empty cell after a wide character
    assert visible.replace(" ", "") == text.strip("`").replace(" ", "")


def test_control_characters_are_neutralised():
    output, _ = stream("\x1b[31mred\x9b2J\u202e")
    assert "␛[31mred�2J�" in shown(output)
    assert "\x1b[31mred" not in output and "\x9b" not in output


@pytest.mark.parametrize(
    "text",
    [
        " ".join(f"w{number}" for number in range(600)),
        "\n".join(f"w{number}" for number in range(100)),
        "\n".join(f"- w{number}" for number in range(100)),
        "```\n" + "\n".join(f"w{number}" for number in range(100)),
        "```\n" + " ".join(f"w{number}" for number in range(600)) + "\n```",
        "| a |\n|---|\n" + "\n".join(f"| w{number} |" for number in range(60)),
    ],
    ids=["paragraph", "lines", "list", "code", "long code line", "table"],
)
@pytest.mark.parametrize("rows", [2, 5, 24])
def test_nothing_is_lost_when_a_block_is_higher_than_the_screen(text, rows, size):
    size(40, rows)
    visible = shown(stream(text, 5)[0], 40, rows)
    assert re.findall(r"w\d+", visible) == re.findall(r"w\d+", text)


def test_a_line_without_blanks_is_not_lost(size):
    size(20, 5)
    text = "x" * 3000
    assert shown(stream(text, 50)[0], 20, 5).count("x") == 3000


def test_cost_is_linear_in_length():
    def drawn_characters_per_character(length: int) -> float:
        text = ("word " * 20 + "\n") * (length // 101)
        return stream(text, 20)[1].drawn_characters / len(text)

    short, long = drawn_characters_per_character(8_000), drawn_characters_per_character(32_000)
    assert long < 1.2 * short
